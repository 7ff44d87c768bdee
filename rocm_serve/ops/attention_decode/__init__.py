from rocm_serve.ops.aiter_provider import aiter_provider
from rocm_serve.ops.attention_decode.cases import CASES
from rocm_serve.ops.attention_decode.reference import attention_decode
from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.triton_provider import at_most, triton_provider

OP = Op(
    "attention_decode",
    attention_decode,
    CASES,
    rounding_tolerances(),
    mutates=("out_THD",),
    others=(
        aiter_provider("attention_decode"),
        triton_provider("attention_decode", limits=at_most(256, "head_dim", "heads")),
    ),
)
