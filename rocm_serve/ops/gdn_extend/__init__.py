from types import MappingProxyType

from rocm_serve.ops.contract import Op, Tol
from rocm_serve.ops.gdn_extend.cases import CASES
from rocm_serve.ops.gdn_extend.reference import gdn_extend
from rocm_serve.ops.triton_provider import triton_provider

_WHY = "rows are copied, bit by bit"
OP = Op(
    "gdn_extend",
    gdn_extend,
    CASES,
    MappingProxyType({"float32": Tol(0.0, _WHY), "bfloat16": Tol(0.0, _WHY)}),
    mutates=("pending_u", "pending_ba"),
    others=(triton_provider("gdn_extend"),),
)
