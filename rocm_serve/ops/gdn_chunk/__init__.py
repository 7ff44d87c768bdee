from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.gdn_chunk.cases import CASES
from rocm_serve.ops.gdn_chunk.reference import gdn_chunk

OP = Op("gdn_chunk", gdn_chunk, CASES, rounding_tolerances(float32=2e-5), mutates=("state", "out_THV"))
