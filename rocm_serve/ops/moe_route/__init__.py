from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.moe_route.cases import CASES
from rocm_serve.ops.moe_route.reference import moe_route

OP = Op("moe_route", moe_route, CASES, rounding_tolerances())
