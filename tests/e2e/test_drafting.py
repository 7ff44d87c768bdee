"""A server that drafts, over HTTP: its answers are those of one that does not; /metrics says what drafting brings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Server

TRAINED = Path(__file__).parents[2] / "evals" / "tiny" / "checkpoint"
PROMPT = "Question: Ann has 12 apples. Ann buys 7 more apples. How many apples does Ann have now?\nAnswer:"

pytestmark = [pytest.mark.multirank, pytest.mark.slow]


def bodies() -> list[dict[str, Any]]:
    """Greedy and sampled, several choices, stop strings and ends inside a run of drafts, penalties, log-probs."""
    return [
        {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "logprobs": 2},
        {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": [" apples", "####"]},
        {"prompt": PROMPT, "max_tokens": 24, "temperature": 1.0, "seed": 5, "n": 2, "top_p": 0.9},
        {"prompt": PROMPT[:40], "max_tokens": 24, "temperature": 0.7, "seed": 6, "top_k": 20, "min_p": 0.02},
        {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "frequency_penalty": 0.6, "repetition_penalty": 1.1},
        {"prompt": PROMPT, "max_tokens": 1, "temperature": 0},
        {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1},
    ]


def answers(server: Server) -> list[Any]:
    """All at once, so that drafting, single and prompt rows meet in steps."""
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda body: server.complete(**body), bodies()))
    return [(answer["choices"], answer["usage"]) for answer in found]


@pytest.mark.timeout(600)
def test_answers_are_those_without_drafts_and_metrics_count_them(tmp_path: Path) -> None:
    flags = [
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--tp",
        "2",
        "--ep",
        "2",
        "--expert-exchange",
        "torch",
    ]
    flags += ["--max-model-len", "512"]
    with Server(
        TRAINED, tmp_path / "plain", flags
    ) as server:  # at TP 2 a second stage changes no bit: test_topologies.py
        plain = answers(server)
        assert "rocm_serve_draft_tokens_total" not in server.metrics()
    with Server(
        TRAINED, tmp_path / "drafting", [*flags, "--pp", "2", "--speculative", "mtp", "--draft-tokens", "3"]
    ) as server:
        assert answers(server) == plain
        metrics = server.metrics()
    drafts, accepted = (metrics[f"rocm_serve_{name}draft_tokens_total"] for name in ("", "accepted_"))
    assert 0.2 < accepted / drafts < 0.95
    assert metrics["rocm_serve_decode_tokens_total"] / metrics["rocm_serve_decode_forwards_total"] > 1.3
