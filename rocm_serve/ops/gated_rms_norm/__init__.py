from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.gated_rms_norm.cases import CASES
from rocm_serve.ops.gated_rms_norm.reference import gated_rms_norm

OP = Op("gated_rms_norm", gated_rms_norm, CASES, rounding_tolerances())
