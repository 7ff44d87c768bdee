from rocm_serve.ops.aiter_provider import aiter_provider
from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.hip_provider import hip_provider, width_limit
from rocm_serve.ops.rms_norm.cases import ADD_CASES, CASES
from rocm_serve.ops.rms_norm.reference import add_rms_norm, rms_norm
from rocm_serve.ops.triton_provider import triton_provider

OP = Op(
    "rms_norm",
    rms_norm,
    CASES,
    rounding_tolerances(),
    others=(
        hip_provider("rms_norm", lambda facts: width_limit(facts, "hidden_size")),
        aiter_provider("rms_norm"),
        triton_provider("rms_norm"),
    ),
)
ADD_OP = Op(
    "add_rms_norm",
    add_rms_norm,
    ADD_CASES,
    rounding_tolerances(bfloat16=6e-3),
    mutates=("residual_TH",),
    others=(
        hip_provider("add_rms_norm", lambda facts: width_limit(facts, "hidden_size"), folder="rms_norm"),
        aiter_provider("add_rms_norm"),
        triton_provider("add_rms_norm", folder="rms_norm"),
    ),
)
