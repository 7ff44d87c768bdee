from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.rms_norm.cases import ADD_CASES, CASES
from rocm_serve.ops.rms_norm.reference import add_rms_norm, rms_norm

OP = Op("rms_norm", rms_norm, CASES, rounding_tolerances())
ADD_OP = Op("add_rms_norm", add_rms_norm, ADD_CASES, rounding_tolerances(bfloat16=6e-3), mutates=("residual_TH",))
