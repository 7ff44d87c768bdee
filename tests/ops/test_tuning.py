"""What the report says of a provider's kernels: tuned, in part, or chosen by a rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_serve.ops.facts import LinearShape, OpFacts
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
    assert shape_tunings("fp8_linear", "triton", mi300x(TUNED)) == []


def test_without_aiter_or_without_sizes_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiter_abi, "find_aiter", lambda: (None, "is not installed"))
    assert shape_tunings("fp8_linear", "aiter", mi300x(TUNED)) == []
    assert tuning("fp8_linear", "aiter", {"arch": "gfx942"}) == ""
    assert tuning("rms_norm", "reference", mi300x().mapping()) == ""
    assert tuning("rms_norm", "triton", {}) == tuning("rms_norm", "hip", {}) == "tiles by rule"
