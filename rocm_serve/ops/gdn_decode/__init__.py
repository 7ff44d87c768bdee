from rocm_serve.ops.aiter_provider import aiter_provider
from rocm_serve.ops.contract import Op, rounding_tolerances
from rocm_serve.ops.gdn_decode.cases import CASES
from rocm_serve.ops.gdn_decode.reference import gdn_decode
from rocm_serve.ops.triton_provider import at_most, triton_provider

OP = Op(
    "gdn_decode",
    gdn_decode,
    CASES,
    rounding_tolerances(),
    mutates=("state", "out_THV"),
    others=(aiter_provider("gdn_decode"), triton_provider("gdn_decode", limits=at_most(512, "key_dim", "key heads"))),
)
