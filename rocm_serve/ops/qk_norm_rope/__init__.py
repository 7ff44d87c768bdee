from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.hip_provider import hip_provider, width_limit
from rocm_serve.ops.qk_norm_rope.cases import CASES
from rocm_serve.ops.qk_norm_rope.reference import qk_norm_rope
from rocm_serve.ops.triton_provider import triton_provider

OP = Op(
    "qk_norm_rope",
    qk_norm_rope,
    CASES,
    rounding_tolerances(),
    others=(
        hip_provider(
            "qk_norm_rope",
            lambda facts: width_limit(facts, "head_dim", 256) or width_limit(facts, "rotary_dim", 256, multiple=16),
        ),
        triton_provider("qk_norm_rope"),
    ),
)
