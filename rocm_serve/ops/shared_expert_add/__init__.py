from types import MappingProxyType

from rocm_serve.ops.contract import FP32_WHY, Op, Tol
from rocm_serve.ops.shared_expert_add.cases import CASES
from rocm_serve.ops.shared_expert_add.reference import shared_expert_add
from rocm_serve.ops.triton_provider import triton_provider

_BF16_WHY = "three roundings to 8 bits: of the gate before its sigmoid, of the gated rows, of the sum"
OP = Op(
    "shared_expert_add",
    shared_expert_add,
    CASES,
    MappingProxyType({"float32": Tol(4e-6, FP32_WHY), "bfloat16": Tol(5e-3, _BF16_WHY)}),
    others=(triton_provider("shared_expert_add"),),
    parts=("sigmoid_mul",),
)
