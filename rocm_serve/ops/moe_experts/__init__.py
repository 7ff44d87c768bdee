from types import MappingProxyType

from rocm_serve.ops.aiter_provider import aiter_provider
from rocm_serve.ops.contract import BF16_WHY, Facts, Op, Tol
from rocm_serve.ops.moe_experts import whole_range
from rocm_serve.ops.moe_experts.cases import CASES
from rocm_serve.ops.moe_experts.reference import moe_experts
from rocm_serve.ops.triton_provider import GPUS_WITH_FP8, triton_provider

_FP32_WHY = (
    "fp32 sums; where rows are quantised, a last-bit difference of the hidden activation moves an FP8 value by one of "
    "its 2^-4 steps now and then"
)
_SHORT_SUMS = Tol(
    1.5e-2,
    "NVIDIA's FP8 instructions keep 12 to 13 bits of a sum: 1 to 4 % of the codes of hidden rows are their neighbours, "
    "which moves the result by up to 1e-2 and makes it no less right; hidden rows not quantised move it by 2.2e-2",
)


def _triton_bound(arch: str, facts: Facts) -> Tol | None:
    fp8_rows = facts.get("expert_fp8") and facts.get("activation") == "fp8_1x128"
    return _SHORT_SUMS if fp8_rows and arch.startswith("sm_") else None


OP = Op(
    "moe_experts",
    moe_experts,
    CASES,
    MappingProxyType({"float32": Tol(1e-3, _FP32_WHY), "bfloat16": Tol(5e-3, BF16_WHY)}),
    weights=("w13_EIH", "w2_EHI", "w13_scale", "w2_scale"),
    others=(
        aiter_provider("moe_experts", semantics=whole_range.moe_experts),
        triton_provider("moe_experts", archs=GPUS_WITH_FP8, bound=_triton_bound),
    ),
)
