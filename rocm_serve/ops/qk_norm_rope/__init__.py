from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.qk_norm_rope.cases import CASES
from rocm_serve.ops.qk_norm_rope.reference import qk_norm_rope

OP = Op("qk_norm_rope", qk_norm_rope, CASES, rounding_tolerances())
