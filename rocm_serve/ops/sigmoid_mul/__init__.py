from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.sigmoid_mul.cases import CASES
from rocm_serve.ops.sigmoid_mul.reference import sigmoid_mul
from rocm_serve.ops.triton_provider import triton_provider

OP = Op("sigmoid_mul", sigmoid_mul, CASES, rounding_tolerances(), others=(triton_provider("sigmoid_mul"),))
