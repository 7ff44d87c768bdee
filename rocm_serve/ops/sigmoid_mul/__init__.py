from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.sigmoid_mul.cases import CASES
from rocm_serve.ops.sigmoid_mul.reference import sigmoid_mul

OP = Op("sigmoid_mul", sigmoid_mul, CASES, rounding_tolerances())
