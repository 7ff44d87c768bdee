"""Which AITER is installed, and whether its functions have the parameters that our adapters pass. Imports no torch.

AITER is never imported to find out: without a GPU its import fails in other ways than ImportError, and some releases
import with half of their names missing. Its version says little, because release branches pick commits from one
another; so the names of parameters are read from its source.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

DISTRIBUTION = "amd-aiter"  # its name among installed packages; "aiter" is somebody else's
FIRST_RELEASE = "v0.1.17"  # the oldest with every parameter below
_INSTALL = f"install AMD's AITER {FIRST_RELEASE} or newer from its own releases (github.com/ROCm/aiter)"


@dataclass(frozen=True, slots=True)
class Need:
    """A function that an adapter calls, and the parameters that it passes, all by keyword."""

    module: str
    function: str  # "name" or "Class.method"
    passes: tuple[str, ...]

    @property
    def path(self) -> str:
        """Return its file inside the package's folder."""
        return "/".join(self.module.split(".")[1:]) + ".py"


_PARSING = threading.Lock()  # CPython 3.11 counts the depth of a tree for all threads together: two parses fail


def parsed(path: Path) -> ast.Module:
    """Read a source file as a tree. Errors: OSError, SyntaxError."""
    with _PARSING:
        return ast.parse(path.read_text(encoding="utf-8"))


def _need(module: str, function: str, passes: str) -> Need:
    return Need(module, function, tuple(passes.split()))


_RMSNORM = _need("aiter.ops.rmsnorm", "rmsnorm", "out input weight epsilon gemma_norm")
_SHUFFLE = _need("aiter.ops.shuffle", "shuffle_weight", "x layout")
_CUSTOM_AR = "aiter.dist.device_communicators.custom_all_reduce"

# What each adapter calls, by op. tests/ops/aiter_standin hold the adapters to this table.
NEEDS: Mapping[str, tuple[Need, ...]] = MappingProxyType(
    {
        "rms_norm": (_RMSNORM,),
        "add_rms_norm": (
            _need(
                "aiter.ops.rmsnorm",
                "add_rmsnorm",
                "out input residual_in residual_out weight epsilon gemma_norm",
            ),
        ),
        "linear": (_need("aiter.tuned_gemm", "gemm_a16w16", "A B otype"),),
        "fp8_linear": (
            _need("aiter.ops.quant", "per_group_quant_hip", "x quant_dtype group_size transpose_scale"),
            _need("aiter.ops.gemm_op_a8w8", "gemm_a8w8_blockscale_bpreshuffle", "XQ WQ x_scale w_scale dtype"),
            _SHUFFLE,
        ),
        "moe_experts": (
            _need(
                "aiter.fused_moe",
                "fused_moe",
                "hidden_states w1 w2 topk_weight topk_ids expert_mask activation quant_type w1_scale w2_scale"
                " a1_scale num_local_tokens dtype",
            ),
            _SHUFFLE,
        ),
        "kv_write": (
            _need(
                "aiter.ops.cache",
                "reshape_and_cache_flash",
                "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale",
            ),
        ),
        "attention_prefill": (
            _need(
                "aiter.ops.mha",
                "flash_attn_varlen_func",
                "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale causal",
            ),
        ),
        "attention_decode": (
            _need(
                "aiter.ops.triton.attention.unified_attention",
                "unified_attention",
                "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size"
                " block_table softcap q_descale k_descale v_descale",
            ),
        ),
        "gdn_chunk": (
            _need(
                "aiter.ops.triton.gated_delta_net.gated_delta_rule",
                "chunk_gated_delta_rule_opt_vk",
                "q k v g beta initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens state_dtype",
            ),
        ),
        "gdn_decode": (
            _need(
                "aiter.ops.triton.gated_delta_net.fused_rearrange_sigmoid_gdr",
                "fused_rearrange_sigmoid_gated_delta_rule",
                "A_log a b dt_bias qkv key_dim value_dim head_k_dim head_v_dim initial_state inplace_final_state"
                " cu_seqlens ssm_state_indices use_qk_l2norm_in_kernel",
            ),
        ),
        "all_reduce": (
            _need(_CUSTOM_AR, "CustomAllreduce.__init__", "group device max_size"),
            _need(_CUSTOM_AR, "CustomAllreduce.custom_all_reduce", "input"),
            _need(
                _CUSTOM_AR,
                "CustomAllreduce.custom_fused_ar_rms",
                "input residual_inp weight eps use_1stage gemma_norm",
            ),
        ),
    }
)

# Releases without this parameter choose the wrong FP8 dialect when they were built for several architectures, and their
# all-reduce lets a rank overwrite what its peers still read. Their signatures do not show either.
_MARK = _RMSNORM


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters of one definition that a caller may name, and those without a default. `self` is left out."""

    names: tuple[str, ...]
    required: tuple[str, ...]


def refusal(op: str) -> str | None:
    """Say why the installed AITER cannot serve `op`, as the end of a sentence that begins with "aiter"; None if it can.

    Reads at most a few source files, once for each folder.
    """
    folder, why = find_aiter()
    return why if folder is None else _refusal_of(folder, op)


def find_aiter() -> tuple[Path | None, str]:
    """Return the folder of AMD's package, or None and why there is none. Imports nothing of it."""
    spec = importlib.util.find_spec("aiter")
    if spec is None:
        return None, f"is not installed; {_INSTALL}, not `pip install aiter`: that is another project"
    if spec.origin is None or not spec.submodule_search_locations:
        places = ", ".join(spec.submodule_search_locations or ["one file"])
        return None, f"is no package here but {places} (the folder of a checkout? name the one inside it); {_INSTALL}"
    folder = Path(spec.origin).parent
    if (folder / "jit" / "core.py").is_file():
        return folder, ""
    if (folder / "iter_to_aiter.py").is_file():
        return None, f"in {folder} is the registry's package for asynchronous iterators: uninstall it and {_INSTALL}"
    return None, f"in {folder} is not AMD's: it has no jit/core.py; remove it and {_INSTALL}"


def installed_version() -> str | None:
    """Return the version that the installed distribution gives itself: for reports, never for a choice."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


@lru_cache(maxsize=256)
def _refusal_of(folder: Path, op: str) -> str | None:
    why = next((why for need in NEEDS[op] if (why := lacks(folder, need))), None)
    if why is None and (mark := lacks(folder, _MARK)):
        why = f"{mark}, so it is of the releases whose FP8 dialect and all-reduce can be wrong"
    if why is None:
        return None
    version = installed_version()
    which = f"{DISTRIBUTION} {version}, {folder}" if version else str(folder)
    return f"({which}) is not served: {why}; {_INSTALL}"


def lacks(folder: Path, need: Need) -> str | None:
    """Say in what an AITER's source differs from what an adapter needs; None when it has it all.

    Where a function is defined in several branches, every definition must do.
    """
    path = folder / need.path
    if not path.is_file():
        return f"it has no module {need.module}"
    found = tuple(definitions(parsed(path), need.function))
    if not found:
        return f"{need.module} defines no {need.function}"
    for one in found:
        missing = [name for name in need.passes if name not in one.names]
        if missing:
            return f"{need.module}.{need.function} has no parameter {', '.join(missing)}"
        unknown = [name for name in one.required if name not in need.passes]
        if unknown:
            return f"{need.module}.{need.function} demands the parameter {', '.join(unknown)}, which we do not know"
    return None


def definitions(module: ast.Module, function: str) -> Iterator[Signature]:
    """Yield every definition of "name" or "Class.method" in a module, also under an if or a try."""
    owner, _, name = function.rpartition(".")
    bodies: list[Sequence[ast.stmt]] = [module.body]
    if owner:
        bodies = [one.body for one in _statements(module.body) if isinstance(one, ast.ClassDef) and one.name == owner]
    for body in bodies:
        for one in _statements(body):
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name == name:
                yield _signature(one.args, method=bool(owner))


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, going into branches but not into functions and classes."""
    for one in body:
        yield one
        if isinstance(one, ast.If | ast.For | ast.While | ast.With | ast.Try):
            for name in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(one, name, ()))
            for handler in getattr(one, "handlers", ()):
                yield from _statements(handler.body)


def _signature(args: ast.arguments, *, method: bool) -> Signature:
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    required = positional[: len(positional) - len(args.defaults)]
    required += [arg.arg for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value is None]
    names = [arg.arg for arg in (*args.args, *args.kwonlyargs)]
    own = set(positional[:1]) if method else set()
    return Signature(tuple(n for n in names if n not in own), tuple(n for n in required if n not in own))
