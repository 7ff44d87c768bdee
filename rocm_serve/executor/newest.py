"""Tokens from the last stage to the first, which embeds them, where steps are planned before the host knows them.

The edge has a communicator of its own: what one communicator is given runs in order. A receive is posted when a step
reads what it brings, not before: where the device runs all in one queue, rows of a step that reads none of it would
stand behind it, and the last stage may wait for those rows first (docs/decisions/0017).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from rocm_serve.messages import Plan


class Coming(Protocol):
    """A posted receive."""

    def wait(self) -> torch.Tensor:
        """Return the tokens, int64 [N, 1], once they are here: on a GPU, for what is launched from now on."""
        ...


class NewestTokens:
    """The first stage's end: one message for each step that draws without the host, in the order of the steps.

    `post`: asks for the next message, of so many tokens. `keep`: has them read from these slots by later steps. `most`:
    plans that may be in flight; so many messages are on their way at most, and the next plan has the oldest taken: the
    result of its step is known then.
    """

    def __init__(
        self, post: Callable[[int], Coming], keep: Callable[[Sequence[int], torch.Tensor], None], most: int
    ) -> None:
        self._post = post
        self._keep = keep
        self._most = most
        self._coming: deque[tuple[int, list[int]]] = deque()

    def warm_up(self) -> None:
        """Take the one token that the last stage sends first of all."""
        self._post(1).wait()

    def expect(self, plan: Plan) -> None:
        """Note that a message of this step's tokens will come."""
        self._coming.append((plan.seq, [work.slot for work in plan.work if work.samples]))

    def bring(self, plan: Plan) -> None:
        """Ask for the tokens that the step reads, and older ones, and take them. Call it before the step begins."""
        while self._coming and (self._coming[0][0] <= plan.reads or len(self._coming) == self._most):
            self._take()

    def bring_all(self) -> None:
        while self._coming:
            self._take()

    def _take(self) -> None:
        _, slots = self._coming.popleft()
        self._keep(slots, self._post(len(slots)).wait()[:, 0])
