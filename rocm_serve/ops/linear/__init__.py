from rocm_serve.ops.aiter_provider import aiter_provider
from rocm_serve.ops.contract import Op, Provider, lazy, rounding_tolerances
from rocm_serve.ops.linear.cases import CASES
from rocm_serve.ops.linear.reference import linear
from rocm_serve.ops.triton_provider import triton_provider
from rocm_serve.platform.table import archs_of

OP = Op(
    "linear",
    linear,
    CASES,
    rounding_tolerances(),
    weights=("weight_NK",),
    others=(
        aiter_provider("linear"),
        Provider(
            "torch",
            load=lazy("rocm_serve.ops.linear.vendor", "linear"),
            archs=archs_of("linear", "torch"),
            packages=("torch",),
        ),
        triton_provider("linear"),
    ),
)
