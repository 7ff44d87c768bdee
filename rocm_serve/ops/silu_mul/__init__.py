from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.silu_mul.cases import CASES
from rocm_serve.ops.silu_mul.reference import silu_mul
from rocm_serve.ops.triton_provider import triton_provider

OP = Op("silu_mul", silu_mul, CASES, rounding_tolerances(), others=(triton_provider("silu_mul"),))
