from types import MappingProxyType

from rocm_serve.ops.contract import Op, Tol
from rocm_serve.ops.quantise_rows.cases import CASES
from rocm_serve.ops.quantise_rows.reference import quantise_rows
from rocm_serve.ops.triton_provider import triton_provider

_WHY = "a quotient that float64 puts on the other side of a rounding boundary moves an FP8 value by one 2^-4 step"

# No provider of AITER's: in fnuz it quantises to 240, so that experts of another provider would get rows that their own
# quantisation does not give. Rows are read once and written at half their size or less by every kernel.
OP = Op(
    "quantise_rows",
    quantise_rows,
    CASES,
    MappingProxyType({"float32": Tol(1e-3, _WHY), "bfloat16": Tol(1e-3, _WHY)}),
    others=(triton_provider("quantise_rows"),),
)
