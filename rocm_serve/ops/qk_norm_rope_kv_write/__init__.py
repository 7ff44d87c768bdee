from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.qk_norm_rope_kv_write.cases import CASES
from rocm_serve.ops.qk_norm_rope_kv_write.reference import qk_norm_rope_kv_write
from rocm_serve.ops.triton_provider import triton_provider

OP = Op(
    "qk_norm_rope_kv_write",
    qk_norm_rope_kv_write,
    CASES,
    rounding_tolerances(),
    mutates=("k_pages_PSGD", "v_pages_PSGD"),
    parts=("qk_norm_rope", "kv_write"),
    others=(triton_provider("qk_norm_rope_kv_write"),),
)
