"""`rocm-serve tune` on a machine without a GPU, its compilers, and Triton without launches."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rocm_serve.cli import app
from rocm_serve.errors import UserError
from rocm_serve.ops import tiles
from rocm_serve.platform.facts import GpuFacts
from rocm_serve.tuning import command
from rocm_serve.tuning.bench import asked_for, bench_of, make
from rocm_serve.tuning.command import Request, default_table
from rocm_serve.tuning.compiling import Compilers
from rocm_serve.tuning.static import facts_on, model_of, wish_of
from rocm_serve.tuning.wish import Point, Wish

STAND_IN = """
import sys
wish = sys.stdin.readline()
assert '"arch":"sm_90"' in wish
for line in sys.stdin:
    if '"BM":99' in line:
        break
    print("no" if '"BM":13' in line else "", flush=True)
"""


@cache
def _wish(arch: str = "sm_90") -> Wish:
    return wish_of(facts_on(model_of(None, "tiny"), arch, 1, {}), {}, 0)


def _request(**changes: object) -> Request:
    values: dict[str, object] = {
        "model": None,
        "shape": "tiny",
        "tp": 1,
        "rows": (4,),
        "only": (),
        "arch": None,
        "op": {},
        "out": None,
        "report": None,
        "budget_s": 1.0,
        "jobs": 1,
        "seed": 0,
    }
    return Request(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "gpus_seen_by_torch", lambda: GpuFacts(kind="none", torch_build="2.13"))


def test_without_a_gpu_tune_says_so_and_what_is_legal() -> None:
    with pytest.raises(UserError, match="tune needs a GPU: torch 2.13 sees none here; legal without one: --dry-run"):
        _request().run(print)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": None}, "one of --model DIR and --shape"),
        ({"shape": "q36"}, "--shape q36: no such shape; legal: q35tp1, q38tp8"),
        ({"only": ("expert",)}, "--only expert: no such call; legal: experts, attention"),
        ({"rows": (0,)}, "--rows 0"),
        ({"arch": "sm_80"}, "--arch sm_80: not known; legal: gfx942"),
        ({"arch": None}, "with --dry-run name one"),
    ],
)
def test_a_bad_wish_is_refused_in_its_own_words(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        _request(**{"arch": "sm_90"} | changes).list_candidates(print)


def test_a_dry_run_lists_every_candidate_for_a_card_that_is_not_here() -> None:
    pytest.importorskip("triton")
    said: list[str] = []
    assert _request(arch="gfx942", only=("experts", "attention")).list_candidates(said.append) == 0
    heads = [line for line in said if not line.startswith("  ")]
    assert any(line.startswith("moe_experts ") and "experts rows 4" in line for line in heads)
    listed = sum(line.startswith("  ") for line in said)
    assert said[-1] == f"{listed} candidates; gfx942 is not here, nothing was compiled"
    assert sum("(the rule)" in line for line in said) == len(heads) - 2


def test_the_command_takes_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Request] = []
    monkeypatch.setattr(Request, "list_candidates", lambda self, say: seen.append(self) or 0)
    given = "tune --shape tiny --rows 4 --rows 8 --only experts --op linear=reference --dry-run"
    for card in ("--arch gfx950", "--gpu MI355X", "--gpu mi355x --arch gfx950"):
        assert CliRunner().invoke(app, f"{given} {card}".split()).exit_code == 0
        assert seen[-1].arch == "gfx950"
    assert (seen[0].rows, seen[0].only, seen[0].op) == ((4, 8), ("experts",), {"linear": "reference"})


@pytest.mark.parametrize("wish", ["quantise_rows=reference", "gdn_extend=triton", "fp8_linear=reference"])
def test_a_wish_may_name_an_op_that_the_plain_launch_does_not_call(wish: str) -> None:
    pytest.importorskip("triton")
    op, _, provider = wish.partition("=")
    plain = replace(model_of(None, "tiny"), quantization=None)
    assert wish_of(facts_on(plain, "sm_90", 1, {op: provider}), {op: provider}, 0).providers[op] == provider


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--jobs 0", "--jobs 0: legal: 1 or more"),
        ("--budget-s nan", "--budget-s nan: legal: 0 or more"),
        ("--gpu mi300x", "--gpu and --arch are for --dry-run"),
        ("--gpu mi300x --arch gfx950 --dry-run", "--gpu mi300x is gfx942, and --arch says gfx950"),
        ("--out {folder}", "--out {folder}: Is a directory"),
        ("--report {folder}/junk/report.json", "--report {folder}/junk: File exists"),
        ("--out {folder}/junk", "{folder}/junk is no table of tiles: "),
    ],
)
def test_what_cannot_be_is_said_before_a_gpu_is_asked_for(words: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b'{"linear": "\xff')
    run = CliRunner().invoke(app, ["tune", "--shape", "tiny", *words.format(folder=tmp_path).split()])
    assert isinstance(run.exception, UserError) and said.format(folder=tmp_path) in str(run.exception)


def test_a_checkout_has_its_table_in_the_tree() -> None:
    assert default_table("sm_90") == Path(tiles.__file__).parent / "tuned" / "sm_90.json"


def test_an_installation_has_the_users_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.resources, "files", lambda package: tmp_path / "site" / "rocm_serve")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_table("sm_90") == tmp_path / "rocm_serve" / "tuned" / "sm_90.json"


def test_compilers_answer_every_job_also_when_one_ends() -> None:
    compilers = Compilers(_wish(), 1, (sys.executable, "-c", STAND_IN))
    point = Point("experts", {"rows": 4})
    futures = [compilers.compile(point, "one_kernel", {"BM": m}) for m in (16, 13, 32, 99, 64)]
    try:
        assert [future.result(timeout=30) for future in futures] == ["", "no", "", "its compiler has ended", ""]
    finally:
        compilers.stop()


def test_which_tiles_a_call_asks_for_is_seen_without_running_it() -> None:
    pytest.importorskip("triton")
    todo = [Point("experts", {"rows": 5}), Point("attention", {"rows": 3, "context": 64})]
    todo.append(Point("attention", {"rows": 3, "context": 64, "kv": "fp8"}))
    todo += [Point("attention_prefill", {"rows": 300}), Point("gdn_chunk", {"rows": 128, "count": 3})]
    todo += [Point("norm_in_product", {"rows": 3, "name": "qkv_proj"}), Point("shared_down", {"rows": 3})]
    seen = asked_for(_wish(), todo, torch.device("meta"))
    assert (dict(seen[3])["attention_prefill"]["rows"], dict(seen[4])["gdn_chunk"]["rows"]) == (512, 4)
    assert [dict(seen[i])["attention_decode"]["bytes"] for i in (1, 2)] == [2, 1]
    kernels = {kernel: shape for asked in seen.values() for kernel, shape in asked}
    assert kernels["moe_experts"]["rows"] == 8 and kernels["moe_experts"]["h"] == 128
    assert kernels["attention_decode"]["rows"] == 4
    assert (kernels["add_norm_linear"]["rows"], kernels["shared_down_add"]["n"]) == (4, 128)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_a_candidate_is_compiled_for_a_card_that_is_not_here(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    from rocm_serve.ops.triton_launches.triton import compiled_only

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns that its default will change
    bench = bench_of(_wish(arch), torch.device("cpu"), hollow=True)
    before = triton.runtime.jit.JITFunction.run
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        with torch.inference_mode(), compiled_only(arch):
            make(bench, Point("norms", {"rows": 4, "residual": True})).calls[0]()
    assert list(tmp_path.rglob("*.cubin" if arch == "sm_90" else "*.hsaco"))
    assert triton.runtime.jit.JITFunction.run is before
