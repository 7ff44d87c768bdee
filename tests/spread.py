"""Which test worker takes which files: the first those of many processes, the others those of one.

Of two scenes with many processes at once each makes the other late, and where both wait a core has nothing to do.
"""

from __future__ import annotations

from typing import Any

import pytest

# Tests in these wait, or start more processes than one.
MANY = ("tests/two_hosts/", "tests/e2e/", "tests/planted/", "tests/test_")


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Hand out files as `--dist loadfile` does, each worker's own kind first; who has none left takes the other."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByKind(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            first = self.nodes.index(node) == 0
            own = next((file for file in self.workqueue if file.startswith(MANY) is first), None)
            if own is not None:
                self.workqueue.move_to_end(own, last=False)
            super()._assign_work_unit(node)

    return ByKind(config, log)
