"""A rank of the real worker that takes a second for every layer of a request's prompt.

`python -m tests.two_hosts.slow_worker serve FLAGS` is `rocm-serve serve` with such ranks.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from unittest import mock

from rocm_serve.executor.heartbeat import Heartbeat, Phase

WORKER = "tests.two_hosts.slow_worker"
LAYER_S = 1.0

_layer = Heartbeat.layer


def slow_layer(self: Heartbeat, layer: int) -> None:
    """Begin a layer, and stay in it. Steps of warming up have no number."""
    _layer(self, layer)
    if self.progress.step >= 0 and self.progress.phase is Phase.PREFILL:
        time.sleep(LAYER_S)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        from rocm_serve import cli, compose

        slow = partial(compose.serve_with_workers, worker=WORKER)
        with mock.patch.object(compose, "serve_with_workers", slow):
            cli.main()
    else:
        from rocm_serve.executor import worker

        Heartbeat.layer = slow_layer  # type: ignore[method-assign]
        worker.main()
