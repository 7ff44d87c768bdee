from types import MappingProxyType

from rocm_serve.ops.contract import BF16_WHY, Op, Tol
from rocm_serve.ops.moe_experts.cases import CASES
from rocm_serve.ops.moe_experts.reference import moe_experts

_FP32_WHY = (
    "fp32 sums; where rows are quantised, a last-bit difference of the hidden activation moves an FP8 value by one of "
    "its 2^-4 steps now and then"
)
OP = Op(
    "moe_experts",
    moe_experts,
    CASES,
    MappingProxyType({"float32": Tol(1e-3, _FP32_WHY), "bfloat16": Tol(5e-3, BF16_WHY)}),
)
