from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.gdn_decode.cases import CASES
from rocm_serve.ops.gdn_decode.reference import gdn_decode

OP = Op("gdn_decode", gdn_decode, CASES, rounding_tolerances(), mutates=("state", "out_THV", "row_states"))
