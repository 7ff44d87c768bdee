"""Who sums over the ranks of a stage: `--all-reduce`, decided. Pure."""

from __future__ import annotations

from rocm_serve.config.schema import AllReduceName, DeviceName, ServeConfig
from rocm_serve.errors import UserError

_ARCHS = ("gfx942", "gfx950")
_SIZES = (2, 4, 6, 8)


def decide(config: ServeConfig, device: DeviceName, arch: str, nnodes: int, reasons: dict[str, str]) -> AllReduceName:
    """Return who sums. Whether the installed AITER can is found by the ranks.

    Errors: UserError where AITER was asked for and has no kernels for such ranks.
    """
    if config.all_reduce == "auto" and device == "rocm" and config.tp > 1:
        reasons["all_reduce"] = "auto: RCCL's; AITER's own was never run on a GPU by this project"
    if config.all_reduce == "library":
        reasons["all_reduce"] = "--all-reduce"
    if config.all_reduce != "aiter":
        return "library"
    here = config.tp * config.pp // nnodes
    if arch not in _ARCHS:
        why = f"AITER sums on {' and '.join(_ARCHS)}, this is {arch}"
    elif config.tp not in _SIZES:
        why = f"AITER sums over {', '.join(map(str, _SIZES))} ranks, --tp is {config.tp}"
    elif here % config.tp:
        why = f"AITER sums over GPUs of one host, and --tp {config.tp} spans several with {here} ranks a host"
    else:
        return "aiter"
    raise UserError(f"--all-reduce aiter: {why}; legal: auto, library")
