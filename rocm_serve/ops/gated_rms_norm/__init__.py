from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.gated_rms_norm.cases import CASES
from rocm_serve.ops.gated_rms_norm.reference import gated_rms_norm
from rocm_serve.ops.hip_provider import hip_provider, width_limit
from rocm_serve.ops.triton_provider import triton_provider

OP = Op(
    "gated_rms_norm",
    gated_rms_norm,
    CASES,
    rounding_tolerances(),
    others=(
        hip_provider("gated_rms_norm", lambda facts: width_limit(facts, "value_dim", 512)),
        triton_provider("gated_rms_norm"),
    ),
)
