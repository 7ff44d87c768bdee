"""`rocm-serve serve` whose workers are poisoned ones: `python -m tests.e2e.poisoned_server FLAGS`."""

from __future__ import annotations

import sys
from functools import partial
from unittest import mock

from rocm_serve import cli, compose

WORKER = "tests.e2e.poisoned_worker"

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    poisoned = partial(compose.serve_with_workers, worker=WORKER)
    with mock.patch.object(compose, "serve_with_workers", poisoned):
        cli.main()
