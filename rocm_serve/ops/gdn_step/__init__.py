from rocm_serve.ops.contract import FP32_WHY, Facts, Op, Tol
from rocm_serve.ops.gdn_step.cases import CASES
from rocm_serve.ops.gdn_step.reference import gdn_step
from rocm_serve.ops.triton_provider import triton_provider


def _limits(facts: Facts) -> str | None:
    taps, key, value = facts.get("conv_kernel", 4), facts.get("key_dim", 128), facts.get("value_dim", 128)
    if taps != 4:
        return f"takes kernels of 4, not {taps}"
    assert isinstance(key, int) and isinstance(value, int), "sizes"
    return f"takes heads of up to 512, not {key} and {value}" if max(key, value) > 512 else None


OP = Op(
    "gdn_step",
    gdn_step,
    CASES,
    {
        "float32": Tol(4e-6, FP32_WHY),
        "bfloat16": Tol(8e-3, "three roundings to 8 bits: of the convolved rows, of what is read, of the gated result"),
    },
    mutates=("conv_state", "state"),
    parts=("causal_conv", "gdn_decode", "gated_rms_norm"),
    others=(triton_provider("gdn_step", limits=_limits),),
)
