from types import MappingProxyType

from rocm_serve.ops.aiter_provider import aiter_provider
from rocm_serve.ops.contract import BF16_WHY, Facts, Op, OwnBound, Tol
from rocm_serve.ops.moe_experts import hidden_unquantised, whole_range
from rocm_serve.ops.moe_experts.cases import CASES
from rocm_serve.ops.moe_experts.reference import moe_experts
from rocm_serve.ops.tiles_moe import MOST_FEW_ROWS
from rocm_serve.ops.triton_provider import triton_provider

_FP32_WHY = (
    "fp32 sums; where rows are quantised, a last-bit difference of the hidden activation moves an FP8 value by one of "
    "its 2^-4 steps now and then"
)
_SHORT_SUMS = OwnBound(
    1.8e-2,
    "sm_90's FP8 instructions keep 12 to 13 bits of a sum: some codes of hidden rows are their neighbours, which moves "
    "the result by up to 1.5e-2 and makes it no less right; hidden rows not quantised move it by 2e-2 and more",
    exact=hidden_unquantised.moe_experts,
)


def _triton_bound(arch: str, facts: Facts) -> OwnBound | None:
    """Few rows meet gate and up as float16, rows in float32 meet both as float32: their sums are float32's."""
    rows = facts["rows"]
    assert isinstance(rows, int)
    as_fp8 = facts["expert_fp8"] and facts["activation"] == "fp8_1x128" and facts["dtype"] != "float32"
    return _SHORT_SUMS if arch == "sm_90" and as_fp8 and rows > MOST_FEW_ROWS else None


OP = Op(
    "moe_experts",
    moe_experts,
    CASES,
    MappingProxyType({"float32": Tol(1e-3, _FP32_WHY), "bfloat16": Tol(5e-3, BF16_WHY)}),
    weights=("w13_EIH", "w2_EHI", "w13_scale", "w2_scale"),
    others=(
        aiter_provider("moe_experts", semantics=whole_range.moe_experts),
        triton_provider("moe_experts", bound=_triton_bound),
    ),
)
