"""The real server over ranks with one fault: `python -m evals.planted.serve FAULT --model DIR [flags of serve]`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from evals.planted.worker import FAULT
from rocm_serve.compose import prepare, run_directory, serve_with_workers
from rocm_serve.config import load
from rocm_serve.server.run import bind

WORKER = "evals.planted.worker"


def main() -> int:
    name, words = sys.argv[1], sys.argv[2:]
    os.environ[FAULT] = name
    given = {
        flag.removeprefix("--").replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)
    }
    config = load.load({}, None, {load.ENV_PREFIX + field.upper(): value for field, value in given.items()})
    logging.basicConfig(level=config.log_level.upper())
    with run_directory() as keep, contextlib.closing(bind(config.host, config.port)) as sock:
        resolved, tokenizer = prepare(config, keep.path)
        return serve_with_workers(resolved, tokenizer, sock, worker=WORKER)


if __name__ == "__main__":
    sys.exit(main())
