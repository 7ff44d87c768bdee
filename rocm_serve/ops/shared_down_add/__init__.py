from types import MappingProxyType

from rocm_serve.ops.contract import FP32_WHY, Op, Tol
from rocm_serve.ops.shared_down_add.cases import CASES
from rocm_serve.ops.shared_down_add.reference import shared_down_add
from rocm_serve.ops.triton_provider import triton_provider

_BF16_WHY = (
    "four roundings to 8 bits: of the hidden row, whose errors a product averages, of it, of its gate, of the sum"
)
OP = Op(
    "shared_down_add",
    shared_down_add,
    CASES,
    MappingProxyType({"float32": Tol(4e-6, FP32_WHY), "bfloat16": Tol(6e-3, _BF16_WHY)}),
    others=(triton_provider("shared_down_add"),),
    parts=("silu_mul", "linear", "sigmoid_mul"),
)
