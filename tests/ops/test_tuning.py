"""What the report says of a provider's kernels: tuned, in part, or chosen by a rule."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rocm_serve.ops import tiles
from rocm_serve.ops.facts import LinearShape, OpFacts
from rocm_serve.ops.probe_cases import probe_cases
from rocm_serve.ops.tuning import ShapeTuning, shape_tunings, tuning
from rocm_serve.platform import aiter_abi
from rocm_serve.platform.aiter_tables import FP8_PRODUCTS
from tests.ops.probing.facts import tiny_facts


@pytest.fixture
def aiter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs").mkdir()
    rows = "gfx942,304,1,128,256,ck\ngfx942,304,64,128,256,ck\n"
    (tmp_path / "configs" / f"{FP8_PRODUCTS}.csv").write_text(f"gfx,cu_num,M,N,K,libtype\n{rows}")
    monkeypatch.setattr(aiter_abi, "find_aiter", lambda: (tmp_path, ""))
    return tmp_path


def mi300x(*shapes: LinearShape) -> OpFacts:
    return tiny_facts(arch="gfx942", compute_units=304, linears=shapes)


TUNED, OTHER, PLAIN = LinearShape(128, 256, True), LinearShape(384, 256, True), LinearShape(128, 256, False)


@pytest.mark.usefixtures("aiter")
@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ((TUNED, PLAIN), "tuned"),
        ((TUNED, OTHER), "tuned for 1 of 2 shapes, the rest by AITER's rule"),
        ((OTHER,), "by AITER's rule: none of its 1 shapes is tuned for this card"),
        ((PLAIN,), "by AITER's rule"),
    ],
)
def test_the_report_counts_the_shapes_that_are_tuned(shapes: tuple[LinearShape, ...], words: str) -> None:
    assert tuning("fp8_linear", "aiter", mi300x(*shapes).mapping()) == words


def test_each_shape_says_for_which_rows(aiter: Path) -> None:
    found = shape_tunings("fp8_linear", "aiter", mi300x(TUNED, OTHER, PLAIN))
    assert found == [ShapeTuning("[128, 256]", (1, 64)), ShapeTuning("[384, 256]", ())]
    (experts,) = shape_tunings("moe_experts", "aiter", mi300x(), aiter)
    assert experts == ShapeTuning("6 experts, 2 a row, 128 x 128", ())
    assert shape_tunings("rms_norm", "aiter", mi300x(TUNED)) == []
    assert shape_tunings("fp8_linear", "triton", mi300x(TUNED, PLAIN)) == [ShapeTuning("[128, 256]", ())]


def test_without_aiter_or_without_sizes_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiter_abi, "find_aiter", lambda: (None, "is not installed"))
    assert shape_tunings("fp8_linear", "aiter", mi300x(TUNED)) == []
    assert tuning("fp8_linear", "aiter", {"arch": "gfx942"}) == ""
    assert tuning("rms_norm", "reference", mi300x().mapping()) == ""
    assert tuning("rms_norm", "triton", {}) == tuning("rms_norm", "hip", {}) == "tiles by rule"


@pytest.mark.parametrize("op", ["attention_decode", "attention_prefill", "gdn_chunk", "gdn_decode", "gdn_step"])
def test_each_call_of_a_probe_says_what_the_table_has_for_its_shape(op: str) -> None:
    """The report looks for the table's shape in the words of the probe's calls."""
    ((name, _),) = ((one.shape, one.tuned_rows) for one in shape_tunings(op, "triton", tiny_facts()))
    calls = probe_cases(op, tiny_facts())
    assert calls and all(f" {name} " in f" {call} " for call in calls), (name, list(calls))


def test_tiles_of_our_kernels_are_tuned_where_the_table_has_the_models_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = mi300x(TUNED, PLAIN, LinearShape(512, 256, False))
    e, k, h, i = facts.local_experts, facts.top_k, facts.hidden_size, facts.expert_width
    table: tiles.Table = {
        "moe_experts": {f"bits=8,e={e},h={h},i={i},k={k},rows={rows}": {"BM": 16} for rows in (16, 1)},
        "linear": {"bytes=2,k=256,n=128,rows=64": {"BM": 16}, "bytes=2,k=999,n=128,rows=8": {"BM": 16}},
    }
    table["attention_prefill"] = {f"bytes=2,d=64,rows={rows},vectors=2": {"BLOCK_M": 64} for rows in (2048, 8192)}
    table["gdn_chunk"] = {"heads=4,k=32,rows=1,v=48": {"BV": 16}, "heads=8,k=32,rows=1,v=48": {"BV": 16}}
    table["moe_experts"][f"bits=8,e={e + 1},h={h},i={i},k={k},rows=256"] = {"BM": 32}
    monkeypatch.setattr(tiles, "tuned_table", lambda arch: table if arch == "gfx942" else {})
    assert tuning("moe_experts", "triton", facts.mapping()) == "tiles tuned for 1 16 rows, the rest by rule"
    assert tuning("linear", "triton", facts.mapping()) == "tiles tuned for 64 rows in 1 of 2 shapes, the rest by rule"
    assert tuning("gdn_step", "triton", facts.mapping()) == "tiles by rule"
    prefill = tuning("attention_prefill", "triton", facts.mapping())
    assert prefill == "tiles tuned for 2048 8192 rows, the rest by rule"
    assert tuning("gdn_chunk", "triton", facts.mapping()) == "tiles tuned for 1 rows, the rest by rule"
    assert tuning("linear", "hip", facts.mapping()) == "tiles by rule"
    assert shape_tunings("linear", "triton", facts)[0] == ShapeTuning("[128, 256]", (64,))
    other = msgspec.structs.replace(facts, arch="gfx950")
    assert tuning("moe_experts", "triton", other.mapping()) == "tiles by rule"
