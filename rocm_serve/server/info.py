"""What the server knows of its model and engine: one frozen value, one protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, Protocol

from rocm_serve.config.schema import Resolved
from rocm_serve.messages import AddRequest, EffectiveLimits, Output, Stats

EngineState = Literal["starting", "ready", "draining", "dead"]


@dataclass(frozen=True)
class ServerInfo:
    """Facts of the served model that requests are checked against."""

    served_model_name: str
    model: str  # the directory, shown as `root`
    vocab_used: int
    eos_token_ids: tuple[int, ...]
    max_running_requests: int
    max_queued_requests: int = 4096
    seed: int = 0
    reasoning_parser: str | None = None  # a name of server.reasoning
    tool_call_parser: str | None = None  # a name of server.tools
    parallel: Mapping[str, str | int] = field(default_factory=dict)  # how the model is cut, shown with it
    created: int = field(default_factory=lambda: int(datetime.now(UTC).timestamp()))

    @classmethod
    def from_resolved(cls, resolved: Resolved) -> ServerInfo:
        return cls(
            served_model_name=resolved.served_model_name,
            model=resolved.model,
            vocab_used=resolved.vocab_used,
            eos_token_ids=resolved.eos_token_ids,
            max_running_requests=resolved.max_running_requests,
            max_queued_requests=resolved.max_queued_requests,
            seed=resolved.seed,
            reasoning_parser=resolved.reasoning_parser,
            tool_call_parser=resolved.tool_call_parser,
            parallel={name: getattr(resolved, name) for name in ("tp", "pp", "ep", "expert_exchange")},
        )


class EngineClientProtocol(Protocol):
    """What the server asks of the engine's client (rocm_serve.engine.client implements it)."""

    @property
    def state(self) -> EngineState: ...

    @property
    def error(self) -> str | None:
        """The sentence it died with."""
        ...

    @property
    def stats(self) -> Stats: ...

    @property
    def limits(self) -> EffectiveLimits:
        """Known once `start` has returned. Errors: RuntimeError before that."""
        ...

    async def start(self) -> EffectiveLimits: ...

    def batches(self, request: AddRequest) -> AsyncGenerator[list[Output], None]:
        """Submit one choice and yield its news, each time all there are.

        Closing the generator, or cancelling its reader, aborts it.
        """
        ...

    def complete(self, request_id: str) -> None:
        """Say that a choice needs no more tokens (a stop string ended it); its generator is closed next."""
        ...

    async def drain(self) -> None: ...

    async def close(self) -> None: ...
