"""The engine core as a thread of the server's process: the same loop over the same link, one stack for a debugger."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rocm_serve.config.schema import Resolved
from rocm_serve.engine.core import EXIT_FAILED, EXIT_WISH, EngineCore
from rocm_serve.engine.link import CoreLink
from rocm_serve.errors import UserError
from rocm_serve.executor.api import Executor
from rocm_serve.messages import CoreFailed
from rocm_serve.stop import CORE_THREAD
from rocm_serve.trace import StepTrace


class CoreThread(threading.Thread):
    """Runs the core until it is drained or fails. `exit_code` is None while it runs; `error` is what ended it badly."""

    def __init__(
        self,
        run_dir: str,
        executor_factory: Callable[[], Executor],
        trace: Callable[[StepTrace], None] | None,
        *,
        adaptive_drafting: bool = False,
    ) -> None:
        super().__init__(name=CORE_THREAD, daemon=True)
        self.exit_code: int | None = None
        self.error: BaseException | None = None
        self._run_dir = run_dir
        self._factory = executor_factory
        self._trace = trace
        self._adaptive = adaptive_drafting

    def run(self) -> None:
        try:
            link = CoreLink(self._run_dir)
            try:
                executor = self._make(link)
                core = EngineCore(executor, link, trace=self._trace, adaptive_drafting=self._adaptive)
                self.exit_code = core.run()
            finally:
                link.close()
        except UserError as error:
            self.error, self.exit_code = error, EXIT_WISH
        except BaseException as error:
            self.error, self.exit_code = error, EXIT_FAILED
            raise

    def _make(self, link: CoreLink) -> Executor:
        try:
            return self._factory()
        except BaseException as error:
            wish = isinstance(error, UserError)
            link.send(CoreFailed(str(error) if wish else f"the executor failed: {type(error).__name__}: {error}"))
            raise


def run_core_in_thread(
    resolved: Resolved,
    executor_factory: Callable[[], Executor],
    *,
    trace: Callable[[StepTrace], None] | None = None,
) -> CoreThread:
    """Start the core in a thread. `executor_factory` is called there; what it raises reaches the client."""
    thread = CoreThread(resolved.run_dir, executor_factory, trace, adaptive_drafting=resolved.adaptive_drafting)
    thread.start()
    return thread
