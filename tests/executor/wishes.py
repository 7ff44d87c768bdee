"""A Resolved and ModelFacts for tests, small and complete."""

from __future__ import annotations

from typing import Any

from rocm_serve.checkpoint.synthetic_configs import DIMS, SpecialIds, model_config
from rocm_serve.config.schema import Resolved
from rocm_serve.models.qwen3_5.spec import ModelFacts, parse_config

IDS = SpecialIds(1, 2, 3, 4, 5, 6)


def facts() -> ModelFacts:
    return parse_config(model_config("text-bf16", "none", DIMS["default"], IDS), None)


def resolved(**changes: Any) -> Resolved:
    values: dict[str, Any] = {
        "model": "nowhere",
        "served_model_name": "tiny",
        "host": "127.0.0.1",
        "port": 0,
        "tp": 1,
        "pp": 1,
        "ep": 1,
        "nnodes": 1,
        "node_rank": 0,
        "dist_init_addr": "",
        "dist_timeout": 60,
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "fp8_activation": "bf16" if changes.get("device", "cpu") == "cpu" else "fp8_1x128",
        "page_size": 16,
        "chunked_prefill_size": 64,
        "max_running_requests": 8,
        "max_queued_requests": 64,
        "max_model_len": 256,
        "mem_fraction": 0.05,
        "load_format": "auto",
        "enforce_eager": False,
        "op": {},
        "seed": 0,
        "log_level": "info",
        "vocab_size": 2048,
        "vocab_used": 2000,
        "eos_token_ids": (1, 2),
        "torch_threads": 1,
        "run_dir": "nowhere",
    }
    return Resolved(**{**values, **changes})
