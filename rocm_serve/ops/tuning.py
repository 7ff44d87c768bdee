"""Whether a provider's kernels were tuned for the shapes that will run, or are chosen by a rule. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from rocm_serve.ops import tiles
from rocm_serve.ops.facts import OpFacts
from rocm_serve.platform import aiter_abi, aiter_tables


class ShapeTuning(msgspec.Struct, frozen=True):
    """One shape of an op, and the row counts for which its provider has a tuned kernel."""

    shape: str
    tuned_rows: tuple[int, ...]


def shape_tunings(op: str, provider: str, facts: OpFacts, folder: Path | None = None) -> list[ShapeTuning]:
    """List every shape whose kernel AITER, or ours in Triton, looks up in a table; no shape where rules alone choose.

    `folder`: of AITER; the installed one by default.
    """
    if provider == "triton":
        return _triton(op, facts)
    if provider != "aiter":
        return []
    found = folder or aiter_abi.find_aiter()[0]
    if found is None:
        return []
    card = found, facts.arch, facts.compute_units
    if op == "moe_experts" and facts.num_experts:
        name = f"{facts.local_experts} experts, {facts.top_k} a row, {facts.hidden_size} x {facts.expert_width}"
        rows = aiter_tables.tuned_experts(
            *card,
            hidden=facts.hidden_size,
            width=facts.expert_width,
            experts=facts.local_experts,
            top_k=facts.top_k,
            fp8=facts.expert_fp8,
        )
        return [ShapeTuning(name, rows)]
    table = {"fp8_linear": aiter_tables.FP8_PRODUCTS, "linear": aiter_tables.BF16_PRODUCTS}.get(op)
    if table is None:
        return []
    return [
        ShapeTuning(
            f"[{shape.rows}, {shape.columns}]",
            aiter_tables.tuned_products(found, table, *card[1:], shape.rows, shape.columns),
        )
        for shape in facts.linears
        if shape.fp8 == (op == "fp8_linear")
    ]


def tuning(op: str, provider: str, facts: Mapping[str, object]) -> str:
    """Say in a few words how the provider's kernels are chosen; "" where there is nothing to choose."""
    known = _known(facts)
    if provider in ("triton", "hip"):
        return _tiles_words([] if known is None else shape_tunings(op, provider, known))
    if provider != "aiter" or known is None:
        return ""
    shapes = shape_tunings(op, provider, known)
    if not shapes:
        return "by AITER's rule"
    tuned = sum(bool(one.tuned_rows) for one in shapes)
    if tuned == 0:
        return f"by AITER's rule: none of its {len(shapes)} shapes is tuned for this card"
    return f"tuned for {tuned} of {len(shapes)} shapes, the rest by AITER's rule" if tuned < len(shapes) else "tuned"


def _tiles_words(shapes: list[ShapeTuning]) -> str:
    tuned = [one for one in shapes if one.tuned_rows]
    if not tuned:
        return "tiles by rule"
    rows = sorted({count for one in tuned for count in one.tuned_rows})
    of = f" in {len(tuned)} of {len(shapes)} shapes" if len(shapes) > 1 else ""
    return f"tiles tuned for {' '.join(map(str, rows))} rows{of}, the rest by rule"


def _triton(op: str, facts: OpFacts) -> list[ShapeTuning]:
    """List the shapes of the kernel named as the op, and the rows for which `rocm-serve tune` found a tile."""
    table = tiles.tuned_table(facts.arch).get(op, {})
    keys = [{name: int(size) for name, _, size in (part.partition("=") for part in key.split(","))} for key in table]

    def rows(**sizes: int) -> tuple[int, ...]:
        same = [key for key in keys if all(key.get(name) == size for name, size in sizes.items())]
        return tuple(sorted({key["rows"] for key in same if "rows" in key}))

    if op == "moe_experts" and facts.num_experts:
        e, k, h, i = facts.local_experts, facts.top_k, facts.hidden_size, facts.expert_width
        return [ShapeTuning(f"{h}, {k} of {e} experts of {i}", rows(e=e, k=k, h=h, i=i))]
    if op == "attention_decode":
        groups, d = facts.kv_heads, facts.head_dim
        return [ShapeTuning(f"{groups} heads of {d}", rows(groups=groups, d=_padded(d)))]
    if op == "attention_prefill":  # rows of the longest sequence
        shared, d = facts.heads // facts.kv_heads, facts.head_dim
        name = f"{facts.heads} on {facts.kv_heads} heads of {d}"
        return [ShapeTuning(name, rows(vectors=_padded(shared), d=max(16, _padded(d))))]
    if op in ("gdn_step", "gdn_decode", "gdn_chunk"):
        heads, k, v = facts.value_heads, facts.key_dim, facts.value_dim
        return [ShapeTuning(f"{heads} heads of {k} and {v}", rows(heads=heads, k=k, v=v))]
    if op in ("linear", "fp8_linear"):
        own = [shape for shape in facts.linears if shape.fp8 == (op == "fp8_linear")]
        return [ShapeTuning(f"[{one.rows}, {one.columns}]", rows(k=one.columns, n=one.rows)) for one in own]
    return []


def _padded(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _known(facts: Mapping[str, object]) -> OpFacts | None:
    """Return the facts as a value, when all of them are there."""
    if not facts.keys() >= set(OpFacts.__struct_fields__):
        return None
    return OpFacts(**{name: facts[name] for name in OpFacts.__struct_fields__})  # type: ignore[arg-type]
