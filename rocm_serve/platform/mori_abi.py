"""Which MORI is installed, and whether it has the names that parallel/exchange/mori.py uses. Imports no torch.

As with AITER (see aiter_abi.py) it is never imported to find out: without ROCm's libraries its import fails with
OSError, and its version is no proof: on Python 3.12 with an older glibc pip takes release 1.0.0 without a word.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from pathlib import Path

from rocm_serve.platform.aiter_abi import Need, lacks, parsed

DISTRIBUTION = "amd-mori"
_OPS = "mori.ops.dispatch_combine"
_SHMEM = "mori.shmem.api"
_CONFIG = "EpDispatchCombineConfig"
_INSTALL = "install amd-mori 1.2.4 or newer: it has packages for Python 3.12 with glibc 2.39 or newer"

NEEDS = (
    Need(_OPS, "EpDispatchCombineOp.__init__", ("config",)),
    Need(
        _OPS,
        "EpDispatchCombineOp.dispatch",
        ("input", "weights", "scales", "indices", "block_num", "rdma_block_num", "warp_per_block"),
    ),
    Need(
        _OPS,
        "EpDispatchCombineOp.combine",
        ("input", "weights", "indices", "block_num", "rdma_block_num", "warp_per_block"),
    ),
    Need(_SHMEM, "shmem_get_unique_id", ()),
    Need(_SHMEM, "shmem_init_attr", ("flags", "rank", "nranks", "unique_id")),
    Need(_SHMEM, "shmem_finalize", ()),
)

# 1.0.0 has no max_total_recv_tokens. It does not check ids either: those below zero, which padding rows have, are sent
# astray; and its combine takes any routing.
_MARK = "max_total_recv_tokens"
CONFIG_FIELDS = (
    "data_type",
    "rank",
    "world_size",
    "hidden_dim",
    "scale_dim",
    "scale_type_size",
    "max_token_type_size",
    "max_num_inp_token_per_rank",
    "num_experts_per_rank",
    "num_experts_per_token",
    "warp_num_per_block",
    "block_num",
    _MARK,
    "use_external_inp_buf",
    "kernel_type",
    "gpu_per_node",
    "rdma_block_num",
    "num_qp_per_pe",
    "quant_type",
)


def refusal() -> str | None:
    """Say why the installed MORI cannot serve, as the end of a sentence that begins with "mori"; None if it can."""
    folder, why = find_mori()
    return why if folder is None else refusal_of(folder)


def find_mori() -> tuple[Path | None, str]:
    """Return the folder of AMD's package, or None and why there is none. Imports nothing of it."""
    spec = importlib.util.find_spec("mori")
    if spec is None:
        return None, f"is not installed; {_INSTALL}"
    if not spec.submodule_search_locations:
        return None, f"is no package here but one file, {spec.origin}; {_INSTALL}"
    folder = Path(spec.submodule_search_locations[0])
    if not (folder / "ops").is_dir() or not (folder / "shmem").is_dir():
        return None, f"in {folder} is not AMD's: it has no ops and shmem; remove it and {_INSTALL}"
    return folder, ""


def refusal_of(folder: Path) -> str | None:
    """Say what the package in `folder` lacks."""
    why = _config_lacks(folder) or next((why for need in NEEDS if (why := lacks(folder, need))), None)
    if why is None:
        return None
    try:
        which = f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)}, {folder}"
    except importlib.metadata.PackageNotFoundError:
        which = str(folder)
    return f"({which}) is not served: {why}; {_INSTALL}"


def _config_lacks(folder: Path) -> str | None:
    path = folder / "ops" / "dispatch_combine.py"
    if not path.is_file():
        return f"it has no module {_OPS}"
    found = config_fields(parsed(path))
    if not found:
        return f"{_OPS} defines no {_CONFIG}"
    missing = [name for name in CONFIG_FIELDS if name not in found]
    if missing:
        old = ", so it checks neither ids nor the rows of combine" if _MARK in missing else ""
        return f"{_CONFIG} has no field {', '.join(missing)}{old}"
    unknown = [name for name, has_default in found.items() if not has_default and name not in CONFIG_FIELDS]
    if unknown:
        return f"{_CONFIG} demands the field {', '.join(unknown)}, which we do not know"
    return None


def config_fields(module: ast.Module) -> dict[str, bool]:
    """Return the fields of the configuration's dataclass, and of each whether it has a default."""
    for one in module.body:
        if isinstance(one, ast.ClassDef) and one.name == _CONFIG:
            return {
                line.target.id: line.value is not None
                for line in one.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            }
    return {}
