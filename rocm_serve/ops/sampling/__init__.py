from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.sampling.cases import DRAWS, SUMS
from rocm_serve.ops.sampling.reference import draw_token, log_sum_exp
from rocm_serve.ops.triton_provider import triton_provider

OP = Op(
    "draw_token", draw_token, DRAWS, rounding_tolerances(), others=(triton_provider("draw_token", folder="sampling"),)
)
SUM_OP = Op(
    "log_sum_exp", log_sum_exp, SUMS, rounding_tolerances(), others=(triton_provider("log_sum_exp", folder="sampling"),)
)
