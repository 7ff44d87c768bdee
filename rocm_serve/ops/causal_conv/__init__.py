from rocm_serve.ops.causal_conv.cases import CASES
from rocm_serve.ops.causal_conv.reference import causal_conv
from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.triton_provider import at_most, triton_provider

OP = Op(
    "causal_conv",
    causal_conv,
    CASES,
    rounding_tolerances(),
    mutates=("state",),
    others=(triton_provider("causal_conv", limits=at_most(17, "conv_kernel", "kernels")),),
)
