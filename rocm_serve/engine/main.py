"""The engine core as a process of its own: `python -m rocm_serve.engine.main --resolved FILE`. No torch.

The process leaves alone the interrupt that a terminal sends to a whole group: the supervisor decides. SIGTERM drains.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec

from rocm_serve.config.schema import Resolved
from rocm_serve.engine.core import EngineCore
from rocm_serve.engine.link import CoreLink
from rocm_serve.executor.heartbeat import Heartbeat, heartbeat_file
from rocm_serve.executor.multiproc import MultiprocExecutor
from rocm_serve.lifeline import die_with_parent, show_stacks_on_signal
from rocm_serve.trace import StepTrace, tracing

log = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def serve(resolved: Resolved, trace: Callable[[StepTrace], None] | None) -> int:
    """Run the core of this configuration until it ends; return its exit code."""
    link = CoreLink(resolved.run_dir)
    heartbeat = Heartbeat(heartbeat_file(resolved.run_dir, "core"))
    executor = MultiprocExecutor(resolved, heartbeat)
    core = EngineCore(executor, link, trace=trace, adaptive_drafting=resolved.adaptive_drafting)

    def drain(signum: int, frame: FrameType | None) -> None:
        core.drain()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, drain)
    try:
        code = core.run()
        if core.refusal is not None:
            log.error("error: %s", core.refusal)
        return code
    finally:
        link.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rocm_serve.engine.main", description="The engine core.")
    parser.add_argument("--resolved", type=Path, required=True, help="JSON of the resolved configuration")
    args = parser.parse_args(argv)
    resolved = msgspec.json.decode(args.resolved.read_bytes(), type=Resolved)
    logging.basicConfig(level=resolved.log_level.upper(), format=LOG_FORMAT, stream=sys.stderr)
    show_stacks_on_signal()
    die_with_parent()
    with tracing(resolved.trace, "core") as trace:
        return serve(resolved, trace)


if __name__ == "__main__":
    sys.exit(main())
