"""`rocm-serve serve` whose workers hold a model that does nothing: `python -m tests.e2e.null_server FLAGS`.

Server, supervisor, engine core, scheduler, worker processes and their transport are the product's; tokens are random.
"""

from __future__ import annotations

import sys
from functools import partial
from unittest import mock

from rocm_serve import cli, compose

WORKER = "evals.bench_host.null_worker"

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    null = partial(compose.serve_with_workers, worker=WORKER)
    with mock.patch.object(compose, "serve_with_workers", null):
        cli.main()
