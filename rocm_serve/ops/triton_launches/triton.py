"""Triton's launches without the launching: compiled only, or left out. For the tuner, on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@contextmanager
def compiled_only(arch: str | None = None) -> Iterator[None]:
    """Compile what is launched inside the block into Triton's cache on disk, and run nothing.

    `arch`: of a card that is not here; None: for the one that is.
    """
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return original(self, *args, grid=grid, warmup=True, **kwargs)

    with _run_replaced(run), _elsewhere(arch) if arch is not None else nullcontext():
        yield


@contextmanager
def left_out(arch: str) -> Iterator[None]:
    """Launch nothing inside the block; kernels believe that they are on `arch`, whatever is here."""
    with _run_replaced(lambda self, *args, **kwargs: None), _elsewhere(arch):
        yield


@contextmanager
def _run_replaced(run: Any) -> Iterator[None]:
    original = JITFunction.run
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original


@contextmanager
def _elsewhere(arch: str) -> Iterator[None]:
    try:
        before = driver.active
    except RuntimeError:
        before = None  # no GPU here: Triton looks for one again when it is next asked
    driver.set_active(_Elsewhere(arch))
    try:
        yield
    finally:
        driver.set_active(before)


class _Elsewhere:
    """A driver that knows its target and nothing else."""

    def __init__(self, arch: str) -> None:
        hip = arch.startswith("gfx")
        self._target = GPUTarget("hip", arch, 64) if hip else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> str:
        return str(self._target)  # Triton keeps what it compiled by device: that of a card here stays apart

    def get_current_stream(self, device: object) -> int:
        return 0
