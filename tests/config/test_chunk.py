"""--chunked-prefill-size: half of where experts take as long to compute as to read, no more than memory bears."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from rocm_serve.config import chunk
from rocm_serve.config.schema import ServeConfig
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, one_of_each, parse_config, stage_params
from rocm_serve.parallel.layout import bytes_at
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.platform.facts import Platform
from rocm_serve.tuning.shapes import SHAPES, config_of, facts_of

H200 = Platform(device="cuda", arch="sm_90", compute_units=132, hbm_bytes=141 * 10**9, cores=8, free_ram_bytes=10**12)
MI300X = msgspec.structs.replace(H200, device="rocm", arch="gfx942", compute_units=304, hbm_bytes=192 * 10**9)
MI308X = msgspec.structs.replace(MI300X, compute_units=80)
MI325X = msgspec.structs.replace(MI300X, hbm_bytes=256 * 10**9)
MI355X = msgspec.structs.replace(MI300X, arch="gfx950", compute_units=256, hbm_bytes=288 * 10**9)
LAPTOP = msgspec.structs.replace(H200, device="cpu", arch="x86_64", compute_units=0, hbm_bytes=0)


def decided(facts: ModelFacts, platform: Platform, wish: int | None = None) -> tuple[int, str]:
    reasons: dict[str, str] = {}
    config = ServeConfig(model="some/dir", chunked_prefill_size=wish)
    rows = chunk.decide(config, facts, platform, platform.device, 0.9, 2, reasons)
    return rows, reasons.get("chunked_prefill_size", "")


@pytest.mark.parametrize(
    ("shape", "platform", "even", "rows"),
    [
        ("q35tp1", H200, 5410, 2048),
        ("q38tp8", H200, 8656, 4096),
        ("q35tp1", MI300X, 7894, 4096),
        ("q38tp8", MI325X, 12630, 8192),
        ("q38tp8", MI308X, 3324, 2048),
        ("q38tp8", MI355X, 16106, 8192),
    ],
)
def test_half_of_the_balance_to_the_next_power_of_two(shape: str, platform: Platform, even: int, rows: int) -> None:
    facts = facts_of(shape)
    assert chunk.balance(facts, platform) == pytest.approx(even, abs=2)
    found, why = decided(facts, platform)
    assert found == rows
    assert why.startswith("auto: with ") and "the experts take as long to compute as to read" in why


def test_experts_in_bf16_are_read_and_computed_at_the_same_ratio() -> None:
    """Twice the bytes, half the rate: the same rows."""
    fp8 = facts_of("q35tp1")
    assert fp8.quantization is not None
    assert chunk.balance(replace(fp8, quantization=None), H200) == chunk.balance(fp8, H200)


def test_a_wish_is_taken_and_has_no_reason() -> None:
    assert decided(facts_of("q35tp1"), MI300X, wish=100) == (100, "")


def test_a_cpu_and_unknown_cards_have_rows_of_their_own() -> None:
    facts = facts_of("q35tp1")
    assert decided(facts, LAPTOP) == (512, "auto: a CPU computes, whatever the rows")
    assert decided(facts, msgspec.structs.replace(H200, arch="sm_89"))[0] == 2048


def published() -> ModelFacts:
    """Qwen3.8-2.4T-A95B."""
    dims = replace(
        SHAPES["q38tp8"],
        layers=92,
        heads=64,
        kv_heads=4,
        key_heads=16,
        value_heads=128,
        expert_width=2048,
        shared_width=2048,
        vocabulary=248320,
    )
    return parse_config(config_of(dims), None)


def test_what_the_weights_leave_is_shared_with_the_caches() -> None:
    """Two nodes of eight MI300X: 172.8 GB a rank may be used, the weights take 154.7, a quarter of the rest is 4.5."""
    facts, reasons = published(), dict[str, str]()
    config = ServeConfig(model="some/dir", tp=8, pp=2)
    table = stage_params(one_of_each(facts), Mesh(8, 1).coord(0), formats=ConfigFormats(facts), mtp=False)
    whole = [stage_params(facts, Mesh(8, 2).coord(rank), formats=ConfigFormats(facts), mtp=False) for rank in (0, 8)]
    place = Mesh(8, 2).coord(0).place
    most = max(sum(bytes_at(param, place, model_itemsize=2) for param in one.values()) for one in whole)
    assert chunk.weight_bytes(facts, Mesh(8, 2), table, 2) == pytest.approx(most, rel=1e-6)
    assert most == pytest.approx(154.7e9, rel=1e-3)
    assert chunk.decide(config, facts, MI300X, "rocm", 0.9, 2, reasons) == 2048
    assert "may take 25% of what the weights leave of a GPU's memory" in reasons["chunked_prefill_size"]
    assert chunk.decide(config, facts, MI325X, "rocm", 0.9, 2, reasons) == 8192
    assert chunk.decide(config, facts, MI300X, "rocm", 0.8, 2, reasons) == 512, "which does not fit anyway"
