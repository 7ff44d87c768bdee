"""Captured steps: what records and replays them on a GPU, and why a stage's steps cannot be captured.

A graph holds the model, and on the last stage the logits and the plain draw: no transfer between stages, no meeting of
hosts, nothing that the host must know. executor/decode.py says what goes in and what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import torch

from rocm_serve.layers.beside import side_stream
from rocm_serve.ops.bind import REFERENCE, Binding
from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.exchange.contract import ExpertExchange

T = TypeVar("T")

# References in torch that ask the host for nothing; others walk host copies of the batch, which a replay would not see.
_CAPTURED_REFERENCES = frozenset(
    ("rms_norm", "add_rms_norm", "gated_rms_norm", "linear", "silu_mul", "sigmoid_mul", "moe_route", "qk_norm_rope")
    + ("shared_expert_add",)
)
_NOT_CALLED = frozenset(
    ("attention_prefill", "gdn_chunk", "log_sum_exp")  # not in decode steps
    + ("gdn_step", "qk_norm_rope_kv_write")  # by reference, layers call their parts instead
    + ("add_norm_linear", "shared_down_add")  # the same
)
_WITH_PROMPTS = ("attention_prefill", "causal_conv", "gdn_chunk", "moe_experts")
_WARM_UP_RUNS = 2  # before recording: compiled kernels, handles and workspaces are there then


class Recorder(Protocol):
    """Records steps and replays them."""

    def host_copies(self, contexts_B: torch.Tensor, slots_B: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return what `Sequences` of a batch of fixed size is to hold as its contexts and slots on the host."""
        ...

    def host_copy(self, values: torch.Tensor, bound: tuple[int, ...]) -> tuple[int, ...]:
        """Return what the host is to hold of integers that differ from step to step; `bound`: the most of each."""
        ...

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Return what does all that `run` does, from and to the same memory, whenever it is called.

        Every call returns the same tensors; those of the call before are overwritten.
        """
        ...


class DeviceGraphs:
    """Graphs of CUDA or HIP, by torch; all in one pool of memory. Their steps never run at the same time.

    `beside`: layers have a second stream for what may run beside the rest (layers/beside.py).
    """

    def __init__(self, max_model_len: int, *, beside: bool = False) -> None:
        self._longest = max_model_len - 1
        self._wants_side = beside
        self._pool: tuple[int, int] | None = None
        self._stream: torch.cuda.Stream | None = None  # one for all, and one beside: BLAS keeps a workspace for each
        self._side: torch.cuda.Stream | None = None

    def host_copies(self, contexts_B: torch.Tensor, slots_B: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the longest contexts that may come: an op that looks must be right for all of them."""
        size = len(contexts_B)
        return (self._longest,) * size, (0,) * size

    def host_copy(self, values: torch.Tensor, bound: tuple[int, ...]) -> tuple[int, ...]:
        """Return `bound`: what the host decides by it must be right for all values."""
        return bound

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """See Recorder. Runs `run` a few times first."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._stream = stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), self._beside():
            for _ in range(_WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL look at events meanwhile, which the strictest mode takes for a fault of this one.
        recording = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        with recording, self._beside():
            left = run()

        def replay() -> T:
            graph.replay()
            return left

        return replay

    def _beside(self) -> AbstractContextManager[None]:
        if not self._wants_side:
            return nullcontext()
        self._side = self._side or torch.cuda.Stream()
        return side_stream(self._side)


def refusal(report: Sequence[Binding], comm: Comm, exchanges: Iterable[ExpertExchange]) -> str | None:
    """Say why steps of these ops and collectives cannot be captured; None: they can. The same on every rank."""
    walking = [line.op for line in report if line.provider == REFERENCE and _walks(_op(line))]
    if walking:
        return f"{', '.join(walking)} by reference reads the batch on the host"
    reasons = (comm.graph_refusal, *(exchange.graph_refusal for exchange in exchanges))
    return next((why for why in reasons if why is not None), None)


def lost_by_reference(op: str) -> str | None:
    """Say which steps are not captured where this op runs as its reference; None: any may be."""
    if _walks(op):
        return "no step is captured as a device graph"
    return "no step with rows of a prompt is captured as a device graph" if op in _WITH_PROMPTS else None


def prompt_refusal(report: Sequence[Binding]) -> str | None:
    """Say why steps with rows of a prompt cannot be captured; None: they can, where steps can be captured at all."""
    others = [line.op for line in report if _op(line) in _WITH_PROMPTS and line.provider != "triton"]
    return f"{', '.join(others)}: only those by triton ask the host for nothing" if others else None


def _op(line: Binding) -> str:
    """Name the op, also where the line is of one layer: "layers.3.gdn_chunk"."""
    return line.op.rpartition(".")[2]


def _walks(op: str) -> bool:
    return op not in _CAPTURED_REFERENCES and op not in _NOT_CALLED
