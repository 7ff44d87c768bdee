from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.linear.cases import CASES
from rocm_serve.ops.linear.reference import linear

OP = Op("linear", linear, CASES, rounding_tolerances())
