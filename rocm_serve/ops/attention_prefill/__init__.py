from rocm_serve.ops.aiter_provider import aiter_provider
from rocm_serve.ops.attention_prefill.cases import CASES
from rocm_serve.ops.attention_prefill.reference import attention_prefill
from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.triton_provider import at_most, triton_provider

OP = Op(
    "attention_prefill",
    attention_prefill,
    CASES,
    rounding_tolerances(),
    mutates=("out_THD",),
    others=(
        aiter_provider("attention_prefill"),
        triton_provider("attention_prefill", limits=at_most(256, "head_dim", "heads")),
    ),
)
