from types import MappingProxyType

from rocm_serve.ops.aiter_provider import aiter_provider
from rocm_serve.ops.contract import BF16_WHY, Op, Tol
from rocm_serve.ops.moe_experts import whole_range
from rocm_serve.ops.moe_experts.cases import CASES
from rocm_serve.ops.moe_experts.reference import moe_experts
from rocm_serve.ops.triton_provider import GPUS_WITH_FP8, triton_provider

_FP32_WHY = (
    "fp32 sums; where rows are quantised, a last-bit difference of the hidden activation moves an FP8 value by one of "
    "its 2^-4 steps now and then"
)
OP = Op(
    "moe_experts",
    moe_experts,
    CASES,
    MappingProxyType({"float32": Tol(1e-3, _FP32_WHY), "bfloat16": Tol(5e-3, BF16_WHY)}),
    weights=("w13_EIH", "w2_EHI", "w13_scale", "w2_scale"),
    others=(
        aiter_provider("moe_experts", semantics=whole_range.moe_experts),
        triton_provider("moe_experts", archs=GPUS_WITH_FP8),
    ),
)
