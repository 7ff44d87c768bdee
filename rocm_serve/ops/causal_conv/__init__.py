from rocm_serve.ops.causal_conv.cases import CASES
from rocm_serve.ops.causal_conv.reference import causal_conv
from rocm_serve.ops.contract import Op, rounding_tolerances

OP = Op("causal_conv", causal_conv, CASES, rounding_tolerances(), mutates=("state", "row_states"))
