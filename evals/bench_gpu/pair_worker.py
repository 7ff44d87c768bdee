"""A rank of the real worker with random weights made on its device, which stamps every step with the device's time.

The supervisor starts it in place of the real one. Stamps go to `stamps-R.jsonl` in the run's folder, as StageTrace: a
step's first and last moment on the device (on a CPU: of the call), in nanoseconds of time.monotonic_ns().
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from unittest import mock
from zlib import crc32

import torch

from rocm_serve.checkpoint.initial import draw
from rocm_serve.config.graphs import prompt_sizes
from rocm_serve.config.schema import Resolved
from rocm_serve.executor import loaded_stage, loading
from rocm_serve.executor.launched import Launched
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.runner import StageRunner
from rocm_serve.executor.worker import main
from rocm_serve.messages import Plan
from rocm_serve.ops.fp8 import FP8_DTYPES
from rocm_serve.parallel.comm import Comm, as_bytes
from rocm_serve.parallel.layout import Param, Place
from rocm_serve.parallel.mesh import Coord
from rocm_serve.trace import StageTrace, trace_writer
from rocm_serve.tuning import weights

_REST_NS = 300_000_000  # without a step: what the clocks say of each other is looked at again
_LOOKS = 8


def stamps_file(run_dir: str, rank: int) -> Path:
    return Path(run_dir) / f"stamps-{rank}.jsonl"


class HostClock:
    """Stamps of a CPU: a call is over when it returns."""

    def mark(self) -> int:
        return time.monotonic_ns()

    def over(self, mark: int) -> bool:
        return True

    def ns(self, mark: int) -> int:
        return mark

    def compare(self) -> None:
        """There is one clock only."""


class DeviceClock:
    """Stamps of a GPU's stream. What it says is right to some 10 us: as long as it takes to look at both clocks."""

    def __init__(self) -> None:
        self._zero = self.mark()
        self._zero_ns = 0

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def over(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def ns(self, mark: torch.cuda.Event) -> int:
        return self._zero_ns + round(float(self._zero.elapsed_time(mark)) * 1e6)

    def compare(self) -> None:
        """Find out what the host's clock says at a moment of the device. Nothing may run there."""
        torch.cuda.synchronize()
        looks = []
        for _ in range(_LOOKS):
            before = time.monotonic_ns()
            event = self.mark()
            event.synchronize()
            after = time.monotonic_ns()
            looks.append((after - before, (before + after) // 2, event))
        _, self._zero_ns, self._zero = min(looks, key=lambda look: look[0])


class Stamps:
    """Keeps marks until the device has passed them, then writes them down."""

    def __init__(self, clock: HostClock | DeviceClock, file: IO[bytes]) -> None:
        self._clock = clock
        self._write = trace_writer(file)
        self._open: deque[tuple[Plan, object, object]] = deque()
        self._last_ns = 0

    @contextmanager
    def step(self, plan: Plan) -> Iterator[None]:
        """Stamp what is launched inside. Warming up is not stamped."""
        if plan.seq < 0:
            yield
            return
        if time.monotonic_ns() - self._last_ns > _REST_NS:
            self._write_down()
            if not self._open:
                self._clock.compare()
        began = self._clock.mark()
        yield
        self._open.append((plan, began, self._clock.mark()))
        self._write_down()
        self._last_ns = time.monotonic_ns()

    def _write_down(self) -> None:
        while self._open and self._clock.over(self._open[0][2]):  # type: ignore[arg-type]
            plan, *marks = self._open.popleft()
            began_ns, ended_ns = (self._clock.ns(mark) for mark in marks)  # type: ignore[arg-type]
            self._write(StageTrace(plan.seq, len(plan.work), began_ns, ended_ns))


def ends_of_prompt_sizes(most: int) -> tuple[int, ...]:
    """Return the least and the largest size of prompts: nothing asks for others, which would take time to capture."""
    sizes = prompt_sizes(most)
    return tuple(sorted({*sizes[:1], *sizes[-1:]}))


@dataclass(frozen=True, slots=True)
class StampedRunner(StageRunner):
    """Runs plans, and stamps each."""

    stamps: Stamps = field(kw_only=True)

    def launch(self, plan: Plan, hidden_TH: torch.Tensor | None) -> torch.Tensor | Launched:
        with self.stamps.step(plan):
            return StageRunner.launch(self, plan, hidden_TH)


@dataclass(frozen=True, slots=True)
class StampedStage(LoadedStage):
    """A loaded stage whose runner stamps its steps."""

    def runner(self, *, num_pages: int, num_slots: int) -> StageRunner:
        with mock.patch.object(loaded_stage, "prompt_sizes", ends_of_prompt_sizes):
            plain = LoadedStage.runner(self, num_pages=num_pages, num_slots=num_slots)
        parts = {name: getattr(plain, name) for name in StageRunner.__dataclass_fields__}
        file = stamps_file(self.resolved.run_dir, self.coord.rank).open("wb")
        return StampedRunner(**parts, stamps=Stamps(HostClock() if self.device.type == "cpu" else DeviceClock(), file))


def fill(params: Mapping[str, Param], coord: Coord, into: Mapping[str, torch.Tensor], *, seed: int = 0) -> None:
    """Fill parameters where they are, with this rank's shares of tensors that depend on seed and name only."""
    for name, param in params.items():
        held, weight = into[name], name.removesuffix("_scale_inv")
        g = torch.Generator(held.device).manual_seed(crc32(f"{seed} {name}".encode()))
        whole = torch.empty(param.shape, dtype=held.dtype, device=held.device)
        if held.dtype in FP8_DTYPES.values():
            weights.random_codes_(whole, g)
        elif weight != name:
            weights.random_scales_(whole, params[weight].shape[-1], into[weight].dtype, g)
        else:
            how = draw(name, param.shape)
            whole.normal_(how.mean, how.std, generator=g)
        as_bytes(held).copy_(share_of(as_bytes(whole), param, coord.place))


def share_of(whole: torch.Tensor, param: Param, place: Place) -> torch.Tensor:
    """Return what the rank at `place` holds of a whole parameter."""
    for dim, bands in enumerate(param.dims):
        pieces, at = [], 0
        for band in bands:
            held = band.owned(place)
            pieces.append(whole.narrow(dim, at + held.start, len(held)))
            at += band.size
        whole = torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]
    return whole


def load(resolved: Resolved, coord: Coord, comm: Comm, **more: Any) -> StampedStage:
    """Stand in for `load_stage_model`. Providers are bound by the table: probing them would take most of a run."""
    with mock.patch.multiple(loading, dummy_fill=fill, settle=lambda *_: {}):
        stage = loading.load_stage_model(resolved, coord, comm, **more)
    return StampedStage(**{name: getattr(stage, name) for name in LoadedStage.__dataclass_fields__})


if __name__ == "__main__":
    main(load)
