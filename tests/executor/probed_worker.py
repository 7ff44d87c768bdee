"""A rank of the real worker whose ops are those of tests/ops/probing/providers.py."""

from __future__ import annotations

from functools import partial

from rocm_serve.executor.loading import load_stage_model
from rocm_serve.executor.worker import main
from tests.ops.probing.providers import TABLE

if __name__ == "__main__":
    main(partial(load_stage_model, table=TABLE))
