from types import MappingProxyType

from rocm_serve.ops.aiter_provider import aiter_provider
from rocm_serve.ops.contract import Op, Tol
from rocm_serve.ops.kv_write.cases import CASES
from rocm_serve.ops.kv_write.reference import kv_write
from rocm_serve.ops.triton_provider import triton_provider

_WHY = "a copy with one rounding: the bytes are determined"
OP = Op(
    "kv_write",
    kv_write,
    CASES,
    MappingProxyType({"float32": Tol(0.0, _WHY), "bfloat16": Tol(0.0, _WHY)}),
    mutates=("k_pages_PSGD", "v_pages_PSGD"),
    others=(aiter_provider("kv_write"), triton_provider("kv_write")),
)
