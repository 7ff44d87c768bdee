from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.moe_route.cases import CASES
from rocm_serve.ops.moe_route.reference import moe_route
from rocm_serve.ops.triton_provider import triton_provider

OP = Op("moe_route", moe_route, CASES, rounding_tolerances(), others=(triton_provider("moe_route"),))
