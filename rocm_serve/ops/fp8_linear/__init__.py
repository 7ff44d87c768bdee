from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.fp8_linear.cases import CASES
from rocm_serve.ops.fp8_linear.reference import fp8_linear

OP = Op("fp8_linear", fp8_linear, CASES, rounding_tolerances())
