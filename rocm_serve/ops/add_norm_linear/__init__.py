from rocm_serve.ops.add_norm_linear.cases import CASES
from rocm_serve.ops.add_norm_linear.reference import add_norm_linear
from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.triton_provider import triton_provider

OP = Op(
    "add_norm_linear",
    add_norm_linear,
    CASES,
    rounding_tolerances(bfloat16=6e-3),
    mutates=("total_TH",),
    others=(triton_provider("add_norm_linear"),),
    parts=("add_rms_norm", "linear"),
)
