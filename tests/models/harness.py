"""A model under test: HF models with random weights, our stages filled from them, and steps driven by hand.

The steps are built here, apart from the executor: what is judged is the model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from rocm_serve.cache.layout import stage_layout
from rocm_serve.models.qwen3_5.causal_lm import Qwen3_5ForCausalLM as OurModel
from rocm_serve.models.qwen3_5.spec import ConfigFormats, Formats, ModelFacts, parse_config, stage_params
from rocm_serve.models.registry import build_model
from rocm_serve.ops.batch import ForwardBatch, Sequences, StageCache
from rocm_serve.ops.bind import BoundOps, bind_ops
from rocm_serve.parallel.comm import Comm, SoloComm, run_ranks
from rocm_serve.parallel.layout import Place, copies
from rocm_serve.parallel.mesh import Coord, Mesh

EOS = 7
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 1024,
    "eos_token_id": EOS,
}
MOE_SIZES = {
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
}


def hf_model(*, moe: bool = True, seed: int = 0, rope: dict[str, Any] | None = None, **sizes: Any) -> nn.Module:
    """Make an HF model in float32 with weights that no initialisation hides: norms, A_log and dt_bias differ too."""
    torch.manual_seed(seed)
    values = SIZES | (MOE_SIZES if moe else {"intermediate_size": 128}) | sizes
    config = (Qwen3_5MoeTextConfig if moe else Qwen3_5TextConfig)(**values, rope_parameters=rope or ROPE)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = (Qwen3_5MoeForCausalLM if moe else Qwen3_5ForCausalLM)(config).eval().float()
    for name, p in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            p.data = torch.randn_like(p)
        elif "norm" in name:
            p.data = torch.randn_like(p) * 0.3 + (1.0 if "linear_attn.norm" in name else 0.0)
        else:
            p.data = torch.randn_like(p) * (p.shape[-1] ** -0.5 if "conv1d" not in name else 0.5)
    return model


def facts_of(model: nn.Module, architecture: str | None = None, **config: Any) -> ModelFacts:
    """Read the facts from the HF model's own config, as JSON."""
    values = model.config.to_dict() | config
    values["architectures"] = [architecture or type(model).__name__]
    return parse_config(values, None)


def fill(
    into: Mapping[str, torch.Tensor], params: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], place: Place
) -> None:
    """Copy checkpoint tensors into one rank's parameters, as the table says."""
    for name, param in params.items():
        for copy in copies(param, place):
            source = tensors[copy.key][copy.src]
            target = into[name][copy.dst]
            target.copy_(source.view(target.shape).to(target.dtype))


@dataclass
class Stage:
    """One rank of one stage: model and caches."""

    model: OurModel
    cache: StageCache


def build_stage(
    facts: ModelFacts,
    tensors: Mapping[str, torch.Tensor],
    *,
    mesh: Mesh | None = None,
    rank: int = 0,
    comm: Comm | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    formats: Formats | None = None,
    mtp: bool = False,
    page_size: int = 16,
    pages: int = 80,
    slots: int = 8,
    activation: Any = None,
    ops: BoundOps | None = None,
) -> Stage:
    """Build one rank's model, fill it, and give it caches full of NaN (KV) and zeros (states)."""
    mesh = mesh or Mesh(1, 1)
    coord = mesh.coord(rank)
    params = stage_params(facts, coord, formats=formats or ConfigFormats(facts), mtp=mtp)
    ops = ops or bind_ops({}, "cpu", activation=activation)
    model = build_model(facts, coord, params, comm or SoloComm(), ops, device="cpu", dtype=dtype, mtp=mtp)
    fill(dict(model.named_parameters()), params, tensors, Place(mesh.tp, coord.tp_rank))
    model.prepare()
    draft = mtp and coord.last_stage
    made = caches(
        facts, coord, page_size=page_size, pages=pages, slots=slots, dtype=dtype, kv_dtype=kv_dtype, draft=draft
    )
    return Stage(model, made)


def caches(
    facts: ModelFacts,
    coord: Coord,
    *,
    page_size: int = 16,
    pages: int = 80,
    slots: int = 8,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    draft: bool = False,
) -> StageCache:
    """Make one rank's caches: pages full of NaN, states of zeros."""
    layout = stage_layout(facts, coord, page_size)
    keys = (*layout.kv_layers, -1) if draft else layout.kv_layers

    def page_pool() -> torch.Tensor:
        return torch.full((pages, *layout.page_shape), float("nan")).to(kv_dtype or dtype)

    return StageCache(
        page_size=page_size,
        k_pages={i: page_pool() for i in keys},
        v_pages={i: page_pool() for i in keys},
        conv={i: torch.zeros(slots + 1, *layout.conv_shape, dtype=dtype) for i in layout.gdn_layers},
        ssm={i: torch.zeros(slots + 1, *layout.ssm_shape) for i in layout.gdn_layers},
    )


@dataclass
class Text:
    """One sequence that a test computes: its tokens so far, how many are in the cache, its pages and slot."""

    slot: int
    pages: list[int]
    tokens: list[int] = field(default_factory=list)
    cached: int = 0


@dataclass
class Chunk:
    """Rows of one text in a step."""

    text: Text
    tokens: Sequence[int]
    recurrent: bool = False


@dataclass
class Pipeline:
    """All stages of one tensor-parallel rank, called in turn."""

    stages: list[Stage]
    page_size: int = 16

    def step(self, *chunks: Chunk) -> list[torch.Tensor]:
        """Run one batch and return each chunk's float32 logits [rows, V / t], in the order given."""
        assert [c.recurrent for c in chunks] == sorted((c.recurrent for c in chunks), reverse=True)
        rows = torch.cat(self.hidden(*chunks))
        missing = -rows.shape[0] % 32
        logits = self.stages[-1].model.logits(F.pad(rows, (0, 0, 0, missing)))
        return list(logits.split([len(c.tokens) for c in chunks] + [missing])[: len(chunks)])

    @torch.inference_mode()
    def hidden(self, *chunks: Chunk) -> list[torch.Tensor]:
        """Run one batch and return each chunk's rows after the final norm."""
        stream: torch.Tensor | None = None
        for stage in self.stages:
            batch = make_batch(chunks, stage.cache, self.page_size)
            stream = stage.model.forward(batch, stream)
        for chunk in chunks:
            chunk.text.tokens += chunk.tokens
            chunk.text.cached += len(chunk.tokens)
        assert stream is not None
        return list(stream[: batch.num_rows].split([len(c.tokens) for c in chunks]))


def make_batch(chunks: Sequence[Chunk], cache: StageCache, page_size: int) -> ForwardBatch:
    ids = [i for c in chunks for i in c.tokens]
    positions = [c.text.cached + i for c in chunks for i in range(len(c.tokens))]
    index = [
        c.text.pages[p // page_size] * page_size + p % page_size
        for c in chunks
        for p in range(c.text.cached, c.text.cached + len(c.tokens))
    ]
    pad = -len(ids) % 32
    starts = [0]
    for c in chunks:
        starts.append(starts[-1] + len(c.tokens))
    contexts, slots = [c.text.cached for c in chunks], [c.text.slot for c in chunks]
    width = max(len(c.text.pages) for c in chunks)
    sequences = Sequences(
        row_starts=tuple(starts),
        contexts=tuple(contexts),
        slots=tuple(slots),
        num_recurrent=sum(c.recurrent for c in chunks),
        row_starts_B1=torch.tensor(starts, dtype=torch.int32),
        contexts_B=torch.tensor(contexts, dtype=torch.int32),
        slots_B=torch.tensor(slots, dtype=torch.int32),
        page_table_BP=torch.tensor([c.text.pages + [0] * (width - len(c.text.pages)) for c in chunks]).int(),
    )
    return ForwardBatch(
        torch.tensor(ids + [0] * pad), torch.tensor(positions + [0] * pad), torch.tensor(index), sequences, cache
    )


def pipeline(facts: ModelFacts, tensors: Mapping[str, torch.Tensor], *, pp: int = 1, **options: Any) -> Pipeline:
    """Build every stage on one tensor-parallel rank."""
    mesh = Mesh(1, pp)
    return Pipeline([build_stage(facts, tensors, mesh=mesh, rank=r, **options) for r in range(pp)])


def on_ranks(
    facts: ModelFacts,
    tensors: Mapping[str, torch.Tensor],
    tp: int,
    body: Callable[[Pipeline], Sequence[torch.Tensor]],
    **options: Any,
) -> list[torch.Tensor]:
    """Run `body` on `tp` simulated ranks and join their vocabulary shards."""

    def rank(comm: Comm) -> Sequence[torch.Tensor]:
        return body(Pipeline([build_stage(facts, tensors, mesh=Mesh(tp, 1), rank=comm.rank, comm=comm, **options)]))

    shards = run_ranks(tp, rank)
    return [torch.cat(pieces, dim=-1) for pieces in zip(*shards, strict=True)]


def text(slot: int = 1, pages: int = 20) -> Text:
    """Make an empty text with pages of its own, in no particular order."""
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(slot)).tolist()
    return Text(slot, [(slot - 1) * pages + i for i in order])


def prefill(run: Pipeline, t: Text, tokens: Sequence[int], chunk: int = 10**9) -> torch.Tensor:
    """Run a prompt in chunks; return the logits of all rows."""
    return torch.cat([run.step(Chunk(t, tokens[i : i + chunk]))[0] for i in range(0, len(tokens), chunk)])


def decode(run: Pipeline, t: Text, tokens: Sequence[int]) -> torch.Tensor:
    """Feed tokens one by one, step by step; return the logits of all rows."""
    return torch.cat([run.step(Chunk(t, [i], recurrent=True))[0] for i in tokens])


@torch.inference_mode()
def hf_logits(model: nn.Module, tokens: Sequence[int], split: int | None = None) -> torch.Tensor:
    """Logits of all rows from HF: one shot, or the rows from `split` on token by token with its cache."""
    ids = torch.tensor([list(tokens)])
    if split is None:
        return model(ids).logits[0]
    out = model(ids[:, :split], use_cache=True)
    rows, cache = [out.logits[0]], out.cache
    for i in range(split, len(tokens)):
        out = model(ids[:, i : i + 1], cache=cache, use_cache=True)
        rows.append(out.logits[0])
    return torch.cat(rows)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference of log-probabilities."""
    return (a.double().log_softmax(-1) - b.double().log_softmax(-1)).abs().max().item()


def allowed(model: nn.Module, tokens: Sequence[int]) -> float:
    """The bar of parity: 1e-4, or twice HF's own difference between one shot and token by token."""
    return max(1e-4, 2 * difference(hf_logits(model, tokens), hf_logits(model, tokens, 1)))


def random_tokens(count: int, seed: int, vocab: int = SIZES["vocab_size"]) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
