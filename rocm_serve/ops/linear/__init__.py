from rocm_serve.ops.aiter_provider import aiter_provider
from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.linear.cases import CASES
from rocm_serve.ops.linear.reference import linear
from rocm_serve.ops.triton_provider import triton_provider

OP = Op(
    "linear",
    linear,
    CASES,
    rounding_tolerances(),
    weights=("weight_NK",),
    others=(aiter_provider("linear"), triton_provider("linear")),
)
