"""`rocm-serve doctor`: the text, the JSON, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from rocm_serve.cli_doctor import doctor, lines_of
from rocm_serve.errors import UserError
from rocm_serve.executor import kernel_report
from rocm_serve.executor.kernel_report import KernelReport, OpReport, ShapeReport
from rocm_serve.ops.bind import OPS
from rocm_serve.platform.facts import GpuFacts

app = typer.Typer()
app.command()(doctor)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_report, "gpus_seen_by_torch", lambda: GpuFacts(kind="none"))


def run(*words: str) -> str:
    result = CliRunner().invoke(app, words)
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_every_op_has_its_line_and_the_end_says_what_was_not_seen() -> None:
    lines = run("--kernels").splitlines()
    assert lines[0] == "kernels on cpu"
    assert lines[1] == "fp8: e4m3fn, as in checkpoints; products by default with rows as bf16"
    assert [f"{op}: reference" for op in OPS] == lines[3 : 3 + len(OPS)]
    assert lines[3 + len(OPS)] == "not seen:" and len(lines) == 6 + len(OPS)


def test_json_is_the_whole_report(checkpoints: dict[str, Path]) -> None:
    text = run(
        "--kernels", "--json", "--gpu", "mi300x", "--model", str(checkpoints["vl-fp8"]), "--op", "linear=reference"
    )
    made = msgspec.json.decode(text, type=KernelReport)
    assert made.fp8_dialect == "fnuz" and len(made.ops) == len(OPS)
    assert json.loads(text)["ops"][0]["op"] == "rms_norm"
    assert next(one for one in made.ops if one.op == "linear").provider == "reference"


def test_the_text_tells_tuned_from_by_rule_and_shortens_long_lists() -> None:
    shapes = (
        ShapeReport(shape="[128, 256]", rows=(0, 1), tuned_rows=tuple(range(1, 20))),
        ShapeReport(shape="[384, 256]", rows=(0, 1), tuned_rows=()),
    )
    one = OpReport(
        op="fp8_linear",
        provider="aiter",
        tuning="tuned for 1 of 2 shapes, the rest by AITER's rule",
        refused=(("hip", "has none"),),
        probe="passed: 4 calls, relative L2 up to 1.2e-03",
        shapes=shapes,
    )
    report = KernelReport(
        arch="gfx942",
        gpu="MI300X",
        compute_units=304,
        seen=True,
        fp8_dialect="fnuz",
        fp8_activation="fp8_1x128",
        versions={"torch": "2.11"},
        ops=(one,),
        not_seen=("speed",),
    )
    assert lines_of(report) == [
        "kernels on MI300X (gfx942, 304 CUs)",
        "fp8: e4m3fnuz: weights are turned from e4m3fn as they are read, scales doubled;"
        " products by default with rows as fp8_1x128",
        "versions: torch 2.11",
        "fp8_linear: aiter (tuned for 1 of 2 shapes, the rest by AITER's rule);"
        " probe passed: 4 calls, relative L2 up to 1.2e-03",
        "  refused: hip has none",
        "  [128, 256], rows 0 1: tuned for rows 1 2 3 4 5 6 7 8 9 10 11 12 ... 19",
        "  [384, 256], rows 0 1: by rule: no tuned row",
        "not seen:",
        "  speed",
    ]


def test_a_reason_is_told_once_and_an_op_that_is_not_called_has_no_kernel(checkpoints: dict[str, Path]) -> None:
    lines = run("--kernels", "--gpu", "mi355x", "--model", str(checkpoints["text-bf16"]), "--kv-cache-dtype", "fp8")
    aiter = [line for line in lines.splitlines() if line.startswith("  refused: aiter")]
    assert len(aiter) > 4 and sum("as for" not in line for line in aiter) <= len(aiter) - 3
    assert "fp8_linear: not called by this model" in lines
    assert "fp8_e4m3 pages" in lines, "fp8 is a word that serve takes"


def test_shapes_are_those_of_the_experts_on_one_rank(checkpoints: dict[str, Path]) -> None:
    one, two = (
        run("--kernels", "--gpu", "h200", "--model", str(checkpoints["vl-fp8"]), "--tp", "2", "--ep", ep)
        for ep in ("1", "2")
    )
    assert one != two


def test_rows_of_drafts_are_among_the_shapes_in_any_spelling(checkpoints: dict[str, Path]) -> None:
    words = ("--kernels", "--gpu", "mi300x", "--model", str(checkpoints["vl-fp8"]))
    plain, drafting = run(*words), run(*words, "--speculative", "NEXTN", "--draft-tokens", "2")
    assert "rows (1, 3, 5), (1, 1, 3) committed" in drafting and "committed, " not in plain


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "legal: --kernels"),
        (("--kernels", "--gpu", "mi100"), "--gpu mi100: legal: mi300x"),
        (("--kernels", "--tp", "2"), "give --model DIR too"),
        (("--kernels", "--speculative", "mtp"), "give --model DIR too"),
        (("--kernels", "--model", "DIR", "--speculative", "mpt"), "--speculative 'mpt': legal: auto, off, mtp"),
        (("--kernels", "--model", "DIR", "--speculative", "mtp", "--draft-tokens", "5"), "legal: 1..4"),
        (("--kernels", "--model", "DIR", "--op", "linear=cuda"), "linear=cuda"),
        (("--kernels", "--model", "DIR", "--op", "layers.3.gdn_chunk=reference"), "layer 3 does not call gdn_chunk"),
        (("--kernels", "--model", "nowhere"), "no config.json"),
    ],
)
def test_what_cannot_be_answered_is_refused(checkpoints: dict[str, Path], words: tuple[str, ...], why: str) -> None:
    with pytest.raises(UserError, match=why):
        run(*(str(checkpoints["vl-fp8"]) if word == "DIR" else word for word in words))
