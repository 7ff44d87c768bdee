from rocm_serve.ops.aiter_provider import aiter_provider
from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.fp8_linear import whole_range
from rocm_serve.ops.fp8_linear.cases import CASES
from rocm_serve.ops.fp8_linear.reference import fp8_linear
from rocm_serve.ops.triton_provider import triton_provider

OP = Op(
    "fp8_linear",
    fp8_linear,
    CASES,
    rounding_tolerances(),
    weights=("weight_NK", "scale"),
    others=(
        aiter_provider("fp8_linear", semantics=whole_range.fp8_linear),
        triton_provider("fp8_linear"),
    ),
)
