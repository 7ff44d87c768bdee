from rocm_serve.ops.aiter_provider import aiter_provider
from rocm_serve.ops.attention_prefill.cases import CASES
from rocm_serve.ops.attention_prefill.reference import attention_prefill
from rocm_serve.ops.contract import FP32_WHY, Op, Tol
from rocm_serve.ops.triton_provider import at_most, triton_provider

OP = Op(
    "attention_prefill",
    attention_prefill,
    CASES,
    {
        "float32": Tol(2e-6, FP32_WHY),
        "bfloat16": Tol(4e-3, "probabilities and the result are rounded to 8 bits: 2^-9 / sqrt(3) on average, each"),
    },
    mutates=("out_THD",),
    others=(
        aiter_provider("attention_prefill"),
        triton_provider("attention_prefill", limits=at_most(256, "head_dim", "heads")),
    ),
)
