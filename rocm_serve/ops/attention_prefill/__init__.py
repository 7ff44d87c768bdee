from rocm_serve.ops.attention_prefill.cases import CASES
from rocm_serve.ops.attention_prefill.reference import attention_prefill
from rocm_serve.ops.contract import Op, rounding_tolerances

OP = Op("attention_prefill", attention_prefill, CASES, rounding_tolerances(), mutates=("out_THD",))
