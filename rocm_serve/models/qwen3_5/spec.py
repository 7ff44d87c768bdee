"""The parameters of a Qwen3.5-family model: names, bands, and the checkpoint tensors that fill them. Pure, no torch.

Runtime names are those of the modules; checkpoint keys are canonical ones (`model.language_model.` already
stripped, see checkpoint/rules.py). The table does not depend on the tensor-parallel rank: `parallel.layout` cuts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import lcm

from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec_facts import ModelFacts, Quantization, Rope, Yarn, parse_config
from rocm_serve.models.qwen3_5.spec_formats import ConfigFormats, Formats, promised_fp8, scale_key
from rocm_serve.parallel.expert_map import DRAFT_LAYER, ExpertPlan
from rocm_serve.parallel.layout import Axis, Band, Param, ParamDtype, Part, Split, check_degrees
from rocm_serve.parallel.mesh import Coord, split_layers

__all__ = [
    "ConfigFormats",
    "Formats",
    "ModelFacts",
    "Quantization",
    "Rope",
    "Yarn",
    "one_of_each",
    "parse_config",
    "promised_fp8",
    "scale_key",
    "stage_layers",
    "stage_params",
]


_PLAIN = ExpertPlan()


def stage_layers(facts: ModelFacts, coord: Coord) -> range:
    """Return the decoder layers of this rank's pipeline stage.

    Errors: UserError naming the legal pipeline degrees.
    """
    pp = coord.mesh.pp
    if not 1 <= pp <= facts.num_layers:
        raise UserError(
            f"pp {pp} cannot be used: the model has {facts.num_layers} layers; legal: 1..{facts.num_layers}"
        )
    return split_layers(facts.num_layers, pp)[coord.stage]


def one_of_each(facts: ModelFacts) -> ModelFacts:
    """Shorten a model to the first layers that hold every kind: what can be cut there can be cut in all of it."""
    some = max(facts.layer_types.index(kind) for kind in set(facts.layer_types)) + 1
    return replace(facts, num_layers=some, layer_types=facts.layer_types[:some])


def stage_params(
    facts: ModelFacts, coord: Coord, *, formats: Formats, mtp: bool, experts: ExpertPlan = _PLAIN
) -> dict[str, Param]:
    """Make the table of this stage's parameters, by runtime name.

    `experts`: where they are; its degree is the mesh's.
    Errors: UserError for an illegal degree, for MTP that the model lacks, for weights of one fused projection that
    are stored in different precisions, for a placement that is not one of this model's experts.
    """
    assert experts.ep == coord.mesh.ep, f"experts over {experts.ep} ranks, a mesh with ep {coord.mesh.ep}"
    if mtp and not facts.mtp_layers:
        raise UserError("the MTP layer was asked for, but the model has none (mtp_num_hidden_layers is 0)")
    table = _Table(facts, formats, experts)
    params: list[Param] = []
    layers = stage_layers(facts, coord)
    if coord.first_stage:
        params.append(table.vocabulary("model.embed_tokens.weight", "model.embed_tokens.weight"))
    for layer in layers:
        params += table.layer(f"model.layers.{layer}", layer, facts.layer_types[layer] == "full_attention")
    if coord.last_stage:
        head = "model.embed_tokens.weight" if formats.tied else "lm_head.weight"
        params += [table.whole("model.norm.weight", facts.hidden_size), table.vocabulary("lm_head.weight", head)]
        if mtp:
            params += table.mtp(own_embedding=not coord.first_stage)
    splits = [split for param in params for split in param.splits]
    check_degrees(splits, coord.mesh.tp, coord.mesh.ep)
    return {param.name: param for param in params}


@dataclass(frozen=True, slots=True)
class _Cut:
    """`size` elements that may be cut between `units` units (0: never cut)."""

    size: int
    units: int = 0
    what: str = ""
    repeat: bool = False
    axis: Axis = Axis.TP

    @classmethod
    def each(cls, size: int, what: str, axis: Axis = Axis.TP) -> _Cut:
        """Make a cut between any two elements."""
        return cls(size, size, what, axis=axis)

    def band(self, block: int) -> Band:
        """Make the band; with `block` above 1 no scale block is cut either."""
        if not self.units:
            return Band(self.size)
        piece = lcm(self.size // self.units, block)
        units = self.size // piece if self.size % piece == 0 else 1
        if units == self.units:
            return Band(self.size, Split(units, self.what, self.axis, repeat=self.repeat))
        return Band(self.size, Split(units, f"FP8 block{'s' * (units > 1)} ({block} wide) of {self.what}", self.axis))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a fused projection: `cut.size` rows of tensor `key`, from row `start` of its `total` (0: all)."""

    key: str
    cut: _Cut
    start: int = 0
    total: int = 0


class _Table:
    """Writes down the parameters of one model, layer by layer."""

    def __init__(self, facts: ModelFacts, formats: Formats, experts: ExpertPlan) -> None:
        self.facts = facts
        self.formats = formats
        self.experts = experts
        self.block = facts.quantization.block[0] if facts.quantization else 128

    def whole(self, name: str, *shape: int, dtype: ParamDtype = "model") -> Param:
        """A parameter that every rank holds whole."""
        return self._plain(name, [_Rows(name, _Cut(shape[0]))], *shape[1:], dtype=dtype)

    def vocabulary(self, name: str, key: str) -> Param:
        rows = _Cut.each(self.facts.vocab_size, "vocabulary rows")
        return self._plain(name, [_Rows(key, rows)], self.facts.hidden_size)

    def layer(self, prefix: str, layer: int, full_attention: bool) -> Iterator[Param]:
        hidden = self.facts.hidden_size
        yield self.whole(f"{prefix}.input_layernorm.weight", hidden)
        yield self.whole(f"{prefix}.post_attention_layernorm.weight", hidden)
        yield from self._attention(f"{prefix}.self_attn") if full_attention else self._gdn(f"{prefix}.linear_attn")
        yield from (
            self._moe(f"{prefix}.mlp", layer)
            if self.facts.is_moe
            else self._mlp(f"{prefix}.mlp", _Cut.each(self.facts.intermediate_size, "MLP columns"))
        )

    def mtp(self, *, own_embedding: bool) -> Iterator[Param]:
        hidden = self.facts.hidden_size
        if own_embedding:
            yield self.vocabulary("mtp.embed_tokens.weight", "model.embed_tokens.weight")
        yield self.whole("mtp.fc.weight", hidden, 2 * hidden)
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            yield self.whole(f"mtp.{norm}.weight", hidden)
        yield from self.layer("mtp.layers.0", DRAFT_LAYER, full_attention=True)

    def _attention(self, prefix: str) -> Iterator[Param]:
        f = self.facts
        gate = 2 if f.attn_output_gate else 1
        q = _Cut(f.num_heads * gate * f.head_dim, f.num_heads, "attention heads")
        kv = _Cut(f.num_kv_heads * f.head_dim, f.num_kv_heads, "key/value heads", repeat=True)
        rows = [_Rows(f"{prefix}.{x}_proj.weight", cut) for x, cut in (("q", q), ("k", kv), ("v", kv))]
        out = _Cut(f.num_heads * f.head_dim, f.num_heads, "attention heads")
        yield from self._linear(f"{prefix}.qkv_proj.weight", rows, _Cut(f.hidden_size))
        yield from self._row_parallel(f"{prefix}.o_proj.weight", out)
        yield self.whole(f"{prefix}.q_norm.weight", f.head_dim)
        yield self.whole(f"{prefix}.k_norm.weight", f.head_dim)

    def _gdn(self, prefix: str) -> Iterator[Param]:
        f = self.facts
        key = _Cut(f.key_dim, f.linear_num_key_heads, "GDN key heads")
        value = _Cut(f.value_dim, f.linear_num_value_heads, "GDN value heads")
        head = _Cut.each(f.linear_num_value_heads, "GDN value heads")

        def qkv(name: str) -> list[_Rows]:
            total = 2 * key.size + value.size
            starts = ((key, 0), (key, key.size), (value, 2 * key.size))
            return [_Rows(f"{prefix}.{name}.weight", cut, start, total) for cut, start in starts]

        z = _Rows(f"{prefix}.in_proj_z.weight", value)
        ba = [_Rows(f"{prefix}.in_proj_{x}.weight", head) for x in "ba"]
        yield from self._linear(f"{prefix}.in_proj_qkvz.weight", [*qkv("in_proj_qkv"), z], _Cut(f.hidden_size))
        yield self._plain(f"{prefix}.in_proj_ba.weight", ba, f.hidden_size)
        yield self._plain(f"{prefix}.conv1d.weight", qkv("conv1d"), 1, f.conv_kernel)
        for name in ("A_log", "dt_bias"):
            yield self._plain(f"{prefix}.{name}", [_Rows(f"{prefix}.{name}", head)], dtype="float32")
        yield self.whole(f"{prefix}.norm.weight", f.linear_value_head_dim)
        yield from self._row_parallel(f"{prefix}.out_proj.weight", value)

    def _mlp(self, prefix: str, cut: _Cut) -> Iterator[Param]:
        rows = [_Rows(f"{prefix}.{x}_proj.weight", cut) for x in ("gate", "up")]
        yield from self._linear(f"{prefix}.gate_up_proj.weight", rows, _Cut(self.facts.hidden_size))
        yield from self._row_parallel(f"{prefix}.down_proj.weight", cut)

    def _moe(self, prefix: str, layer: int) -> Iterator[Param]:
        f = self.facts
        slots = self.experts.slots_of(layer, f.num_experts)
        shared = f.shared_intermediate_size
        yield self.whole(f"{prefix}.gate.weight", f.num_experts, f.hidden_size)
        yield self.whole(f"{prefix}.shared_expert_gate.weight", 1, f.hidden_size)
        whole = self.experts.shared_is_whole(layer)
        yield from self._mlp(
            f"{prefix}.shared_expert", _Cut(shared) if whole else _Cut.each(shared, "shared expert columns")
        )
        wide = _Cut.each(f.moe_intermediate_size, "expert columns", Axis.ETP)
        hidden = _Cut(f.hidden_size)
        stacks = (("gate_up_proj", ("gate_proj", "up_proj"), wide, hidden), ("down_proj", ("down_proj",), hidden, wide))
        for name, each, rows, columns in stacks:
            yield from self._experts(f"{prefix}.experts", name, each, rows, columns, slots)

    def _experts(
        self, prefix: str, name: str, each: tuple[str, ...], rows: _Cut, columns: _Cut, slots: tuple[int, ...]
    ) -> Iterator[Param]:
        """Stack the experts slot by slot: from one fused tensor, or from each expert's own tensors."""
        experts = self.facts.num_experts
        stem = f"{prefix}.{name}"
        source: tuple[int, ...]
        if self.formats.fused(stem):
            source = (experts, len(each) * rows.size, columns.size)
            plain = slots == tuple(range(experts))
            moved = [(0, None)] if plain else [(e, p) for p, e in enumerate(slots)]
            parts = tuple(
                Part(stem, source, (0, i, 0), (e, i * rows.size, 0), at=p) for e, p in moved for i in range(len(each))
            )
        else:
            source = (rows.size, columns.size)
            parts = tuple(
                Part(f"{prefix}.{e}.{own}.weight", source, (0, i, 0), (0, 0), at=p)
                for p, e in enumerate(slots)
                for i, own in enumerate(each)
            )
        block = self._block_of(stem, parts)
        held = "experts" if len(slots) == experts else "expert slots"
        bands = ((Band(len(slots), Split(len(slots), held, Axis.EP)),), (rows.band(block),) * len(each))
        yield from self._with_scale(stem, (*bands, (columns.band(block),)), parts, block)

    def _row_parallel(self, name: str, columns: _Cut) -> Iterator[Param]:
        yield from self._linear(name, [_Rows(name, _Cut(self.facts.hidden_size))], columns)

    def _linear(self, name: str, rows: Sequence[_Rows], columns: _Cut) -> Iterator[Param]:
        parts = self._parts(rows, (columns.size,))
        block = self._block_of(name, parts)
        dims = (tuple(r.cut.band(block) for r in rows), (columns.band(block),))
        yield from self._with_scale(name, dims, parts, block)

    def _plain(self, name: str, rows: Sequence[_Rows], *trailing: int, dtype: ParamDtype = "model") -> Param:
        dims = (tuple(r.cut.band(1) for r in rows), *((Band(n),) for n in trailing))
        return Param(name, dtype, dims, self._parts(rows, trailing))

    def _parts(self, rows: Sequence[_Rows], trailing: tuple[int, ...]) -> tuple[Part, ...]:
        zeros = (0,) * len(trailing)
        return tuple(
            Part(r.key, (r.total or r.cut.size, *trailing), (i, *zeros), (r.start, *zeros)) for i, r in enumerate(rows)
        )

    def _block_of(self, name: str, parts: Sequence[Part]) -> int:
        """Return the scale block's width, or 1 when the parts are not FP8."""
        quantised = {part.key: self.formats.fp8(part.key) for part in parts}
        if len(set(quantised.values())) > 1:
            yes, no = (next(k for k, fp8 in quantised.items() if fp8 is wanted) for wanted in (True, False))
            raise UserError(f"{name}: {yes} has FP8 scales and {no} has none; legal: both or neither")
        return self.block if any(quantised.values()) else 1

    def _with_scale(
        self, name: str, dims: tuple[tuple[Band, ...], ...], parts: tuple[Part, ...], block: int
    ) -> Iterator[Param]:
        yield Param(name, "model" if block == 1 else "fp8", dims, parts)
        if block == 1:
            return
        for bands in dims[-2:]:
            if len(bands) > 1 and any(band.size % block for band in bands):
                sizes = ", ".join(str(band.size) for band in bands)
                raise UserError(f"{name}: FP8 parts of {sizes} rows; legal: multiples of the {block}-row scale block")
        scaled = tuple(tuple(Band(-(-b.size // block), b.split) for b in bands) for bands in dims[-2:])
        blocks = cache(lambda sizes: (*sizes[:-2], *(-(-n // block) for n in sizes[-2:])))  # those of experts are alike
        starts = cache(lambda rows: (*rows[:-2], *(n // block for n in rows[-2:])))
        scales = tuple(
            Part(scale_key(part.key), blocks(part.source), part.bands, starts(part.start), part.at) for part in parts
        )
        yield Param(scale_key(name), "float32", (*dims[:-2], *scaled), scales)
