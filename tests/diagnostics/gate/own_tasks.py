"""lm-eval that knows no tasks but those of --include_path: `python own_tasks.py -m lm_eval run ...`, and as without it.

It reads its own 13 000 task files at every start, which is most of what a run of few questions costs.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def main() -> None:
    if sys.argv[1:3] != ["-m", "lm_eval"]:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    from lm_eval.tasks._index import TaskIndex

    build = TaskIndex.build

    def included(paths: Iterable[Path], **how: Any) -> dict[str, Any]:
        return build([*paths][1:], **how)

    TaskIndex.build = staticmethod(included)
    del sys.argv[:2]
    runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
