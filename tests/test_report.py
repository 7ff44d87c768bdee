"""What the operator reads at the start."""

from __future__ import annotations

import json
import shlex

import msgspec
import pytest

from rocm_serve.compose import say_ready
from rocm_serve.config.schema import Resolved
from rocm_serve.executor.binding import fallbacks
from rocm_serve.messages import EffectiveLimits
from rocm_serve.ops.bind import Binding
from rocm_serve.platform.facts import Platform
from rocm_serve.report import curl_line, fallback_line, limit_lines, ready_line, start_up_lines
from tests.executor.wishes import resolved as wished

LIMITS = EffectiveLimits(
    max_model_len=1024,
    max_running_requests=7,
    chunked_prefill_size=64,
    page_size=16,
    num_pages=500,
    num_slots=7,
    reasons={"num_slots": "memory of rank 3"},
)


def resolved(name: str = "m") -> Resolved:
    return wished(
        served_model_name=name,
        tp=2,
        pp=2,
        kv_cache_dtype="bfloat16",
        max_model_len=1024,
        op={"layers.3.linear": "reference"},
        run_dir="run",
        reasons={"dtype": "because"},
    )


PLATFORM = Platform(device="cpu", arch="x86_64", cores=2, free_ram_bytes=10**9)


def test_the_start_says_what_was_decided_or_is_no_default_and_nothing_else() -> None:
    lines = list(start_up_lines(resolved(), PLATFORM))
    assert PLATFORM.describe() in lines[0]
    assert "dtype = float32  (because)" in lines
    assert "tp = 2" in lines and "max_running_requests = 8" in lines
    assert any("layers.3.linear = reference" in line for line in lines)
    for field in ("page_size", "seed", "host", "ep", "enforce_eager", "max_total_tokens", "interface", "node_rank"):
        assert not any(line.startswith(f"{field} = ") for line in lines), field
    assert lines[-1] == "logs of workers and core: run"


def test_a_provider_that_is_held_to_is_told_from_one_that_is_preferred() -> None:
    wish = msgspec.structs.replace(
        resolved(), preferred={"attention_decode": "aiter"}, reasons={"op attention_decode": "--attention-backend"}
    )
    lines = list(start_up_lines(wish, PLATFORM))
    assert "op layers.3.linear = reference  (--op)" in lines
    assert "op attention_decode = aiter, if it can  (--attention-backend)" in lines


def test_one_process_has_no_logs_of_workers_to_name() -> None:
    lines = list(start_up_lines(msgspec.structs.replace(resolved(), tp=1, pp=1), PLATFORM))
    assert not any("logs of workers" in line for line in lines)


def test_every_resolved_value_can_be_had_once() -> None:
    lines = list(start_up_lines(resolved(), PLATFORM, everything=True))
    for field in set(Resolved.__struct_fields__) - {"reasons", "notes", "op", "preferred", "run_dir"}:
        assert sum(line.startswith(f"{field} = ") for line in lines) == 1, field
    assert "max_total_tokens = none" in lines


def test_every_effective_limit_is_said_with_its_reason() -> None:
    lines = list(limit_lines(LIMITS))
    assert len(lines) == len(EffectiveLimits.__struct_fields__) - 2
    assert "effective num_slots = 7  (memory of rank 3)" in lines


def test_the_ready_line_names_address_model_topology_and_limits() -> None:
    line = ready_line(resolved(), LIMITS, "http://127.0.0.1:99")
    for fact in (
        "http://127.0.0.1:99",
        " m ",
        "tp 2 x pp 2",
        "float32",
        "bfloat16",
        "1024",
        "7 running",
        "8000 tokens",
    ):
        assert fact in line
    assert "\n" not in line and "ep " not in line


def test_what_makes_it_slow_is_said_beside_the_ready_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert fallback_line(LIMITS) is None
    report = [
        Binding("rms_norm", "reference", (("hip", "failed its probe: 1 x 256: off"),), fell_back=True),
        Binding("gdn_chunk", "reference", (("triton", "failed its probe: off"),), fell_back=True),
    ]
    slow = msgspec.structs.replace(LIMITS, by_reference=fallbacks(report, graphs=True))
    say_ready(resolved(), "http://127.0.0.1:99", slow)
    ready, said, curl = capsys.readouterr().out.splitlines()
    assert ready.startswith("ready: ") and curl.startswith("curl ")
    assert said == (
        "warning: op rms_norm runs as its reference in torch (slow): hip failed its probe: 1 x 256: off;"
        " op gdn_chunk runs as its reference in torch (slow, and no step with rows of a prompt is captured as a device"
        " graph): triton failed its probe: off"
    )
    say_ready(resolved(), "http://127.0.0.1:99", LIMITS)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_the_ready_line_and_the_start_say_where_experts_are_and_how_rows_come_to_them() -> None:
    wish = msgspec.structs.replace(resolved(), ep=2, expert_exchange="torch", expert_capacity=36)
    assert "tp 2 x pp 2, ep 2 by torch, float32" in ready_line(wish, LIMITS, "http://127.0.0.1:99")
    lines = list(start_up_lines(wish, PLATFORM))
    assert {"ep = 2", "expert_exchange = torch", "expert_capacity = 36"} <= set(lines)
    assert not any(line.startswith(("speculative_", "fp8_activation", "expert_placement")) for line in lines)


@pytest.mark.parametrize("name", ["tiny", "it's $HOME", 'a "quoted" \\ name', "модель"])
def test_the_curl_survives_a_shell_whatever_the_model_is_called(name: str) -> None:
    program, url, *rest = shlex.split(curl_line(resolved(name), "http://127.0.0.1:99"))
    assert (program, url) == ("curl", "http://127.0.0.1:99/v1/completions")
    body = json.loads(rest[rest.index("-d") + 1])
    assert body["model"] == name
    assert body["prompt"] and body["max_tokens"] > 0
