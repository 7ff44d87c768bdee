from rocm_serve.ops.attention_decode.cases import CASES
from rocm_serve.ops.attention_decode.reference import attention_decode
from rocm_serve.ops.contract import Op, rounding_tolerances

OP = Op("attention_decode", attention_decode, CASES, rounding_tolerances(), mutates=("out_THD",))
