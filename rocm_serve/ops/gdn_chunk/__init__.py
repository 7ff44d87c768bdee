from rocm_serve.ops.aiter_provider import aiter_provider
from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.gdn_chunk.cases import CASES
from rocm_serve.ops.gdn_chunk.reference import gdn_chunk
from rocm_serve.ops.triton_provider import at_most, triton_provider

OP = Op(
    "gdn_chunk",
    gdn_chunk,
    CASES,
    rounding_tolerances(float32=2e-5),
    mutates=("state", "out_THV"),
    others=(aiter_provider("gdn_chunk"), triton_provider("gdn_chunk", limits=at_most(512, "key_dim", "key heads"))),
)
