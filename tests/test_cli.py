"""The command line as a user meets it: exit codes, one-line errors, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rocm_serve import cli_words, compose
from rocm_serve.checkpoint.synthetic import make_checkpoint
from rocm_serve.cli import main
from rocm_serve.config.schema import ServeConfig
from rocm_serve.parallel.expert_map import ExpertPlan
from rocm_serve.platform import probe
from rocm_serve.version import VERSION
from tests.config.test_resolve import MI300X

ROOT = Path(__file__).parents[1]
Run = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def text_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cli") / "text-fp8", "text-fp8", "bf16")


def in_a_process(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rocm_serve", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """Run the command line in this process: for what ends before the engine starts."""

    def run(*args: str | Path) -> Run:
        monkeypatch.setattr(sys, "argv", ["rocm-serve", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Run([], ended.value.code or 0, out, err)

    return run


def assert_refused(run: Run, *words: str) -> None:
    """Exit code 2, one line that says what was wrong, no traceback."""
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    complaints = [line for line in run.stderr.splitlines() if line.startswith("rocm-serve: ")]
    assert len(complaints) == 1, run.stderr
    for word in words:
        assert word in complaints[0]


def test_version_is_the_packages(here: Callable[..., Run]) -> None:
    for spelled in ("version", "--version"):
        run = here(spelled)
        assert (run.returncode, run.stdout.strip()) == (0, f"rocm-serve {VERSION}")


@pytest.mark.parametrize("command", ["serve", "plan", "report", "make-checkpoint", "version"])
def test_every_command_has_help(here: Callable[..., Run], command: str) -> None:
    run = here(command, "--help")
    assert run.returncode == 0
    assert f"rocm-serve {command}" in run.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["--model DIR"]),
        (["--model", "no/such/dir"], ["no/such/dir", "config.json"]),
        (["--model", "x", "--device", "tpu"], ["--device 'tpu'", "auto, cpu, cuda, rocm"]),
        (["--model", "x", "--ep", "2"], ["--ep 2", "legal: 1"]),
        (["--model", "x", "--node-rank", "1"], ["--node-rank 1", "legal with --nnodes 1: 0"]),
        (["--model", "x", "--mem-fraction", "1.5"], ["--mem-fraction 1.5", "up to 1"]),
        (["--model", "x", "--host", ""], ["--host is empty", "0.0.0.0"]),
        (["--model", "x", "--served-model-name", ""], ["--served-model-name is empty"]),
        (["--model", "x", "--op", "linear"], ["OP=PROVIDER"]),
        (["--model", "x", "--op", "nothing=reference"], ["--op nothing", "no such op", "moe_experts"]),
        (["--model", "x", "--op", "layers.0.linear=magic"], ["linear=magic", "linear has reference"]),
        (["--model", "x", "--config", "absent.toml"], ["absent.toml", "No such file"]),
        (["--model-path", "x", "--ep-size", "8"], ["--ep 8", "legal: 1", "--ep is your --ep-size"]),
        (["--model-path", "x", "--tp-size", "2", "--tp", "4"], ["--tp-size 2 and --tp 4 are one setting"]),
        (["--model-path", "x", "--tp-size", "two"], ["--tp-size 'two'", "a whole number"]),
        (["--model-path", "x", "--chat-template", "y"], ["--chat-template is refused", "folder of --model"]),
        (["--model-path", "x", "--attention-backend", "fa3"], ["--attention-backend 'fa3'", "auto, aiter, triton"]),
        (["--model-path", "x", "--reasoning-parser", "kimi"], ["--reasoning-parser 'kimi'", "legal: qwen3"]),
        (["--model-path", "x", "--tool-call-parser", "glm"], ["--tool-call-parser 'glm'", "legal: qwen3_coder"]),
    ],
)
def test_a_bad_flag_is_one_line_and_exit_code_2(here: Callable[..., Run], flags: list[str], words: list[str]) -> None:
    assert_refused(here("serve", *flags), *words)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--page-size", "3"], "--page-size 3"),
        (["--dist-timeout", "1h"], "--dist-timeout"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--enable-prefix-caching"], "--enable-prefix-caching is refused"),
        (["--config", "absent.toml"], "absent.toml"),
        (["--mem-fraction-static", "7"], "--mem-fraction is your --mem-fraction-static"),
        (["--tp", "2", "--tp-size", "4"], "--tp 2 and --tp-size 4"),
        (["--pp", "3"], "--nnodes 2: 3 ranks"),
    ],
)
@pytest.mark.parametrize("node", [0, 1])
def test_a_bad_flag_on_one_node_is_told_to_the_other(
    here: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, flags: list[str], word: str, node: int
) -> None:
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(cli_words, "tell", lambda *args: told.append(args[:-1]))
    where = ["--nnodes", "2", "--node-rank", str(node), "--dist-init-addr", "10.0.0.1:29500"]
    run = here("serve", "--model", "x", *where, *flags)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert run.stderr.count(word) == 1, run.stderr
    [(kind, member, members, address, why)] = told
    assert (kind, member, members, address) == ("node", node, 2, "10.0.0.1:29500")
    assert word in str(why)


def test_a_word_where_a_number_belongs_is_refused_by_flag(here: Callable[..., Run]) -> None:
    run = here("serve", "--model", "x", "--tp", "two")
    assert run.returncode == 2
    assert "--tp" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", "3"], ["tp 3", "legal: 1, 2, 4"]),
        (["--tp", "32"], ["tp 32", "legal: 1, 2, 4"]),
        (["--pp", "9"], ["--pp 9", "legal: 1..8"]),
        (["--max-model-len", "999999"], ["--max-model-len 999999", "2..16384"]),
        (["--device", "rocm"], ["--device rocm", "legal: auto, cpu"]),
        (["--op", "layers.8.linear=reference"], ["layers 0..7"]),
        (["--op", "layers.3.gdn_chunk=reference"], ["layers.3.gdn_chunk=reference: layer 3", "layers 0 to 2, 4 to 6"]),
        (["--op", "gdn_extend=reference"], ["--op gdn_extend=reference", "drafts are verified, and none are here"]),
        (["--op", "moe_experts=triton"], ["not on cpu; legal there: reference"]),
        (["--enforce-eager", "--graph-max-batch", "8"], ["--enforce-eager and --graph-max-batch 8 contradict"]),
        (["--max-total-tokens", "5"], ["--max-total-tokens 5", "legal: at least 16384"]),
    ],
)
def test_a_wish_that_this_model_cannot_meet_is_one_line_and_exit_code_2(
    here: Callable[..., Run], text_fp8: Path, flags: list[str], words: list[str]
) -> None:
    run = here("serve", "--model", text_fp8, "--port", "0", "--device", "cpu", *flags)
    assert_refused(run, *words)
    assert run.stderr.count("\n") == 1 and not run.stdout, "nothing of a start is said before"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mem-fraction", "0.000001"], ["does not fit", "--mem-fraction"]),
        pytest.param(
            ["--mem-fraction", "0.000001", "--tp", "2"],
            ["does not fit", "--mem-fraction"],
            marks=pytest.mark.multirank,
        ),
    ],
)
def test_a_wish_that_only_the_engine_can_refuse_ends_the_same_way_and_is_told_once(
    text_fp8: Path, flags: list[str], words: list[str]
) -> None:
    run = in_a_process("serve", "--model", text_fp8, "--port", "0", "--device", "cpu", *flags)
    assert_refused(run, *words)
    of_the_server = [line for line in run.stderr.splitlines() if words[0] in line and not line.startswith("[rank-")]
    assert len(of_the_server) == 1, of_the_server


def test_a_port_in_use_is_refused_before_anything_is_read(here: Callable[..., Run], text_fp8: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_refused(here("serve", "--model", text_fp8, "--port", port), f"port {port}", "in use")


def test_a_meeting_place_in_use_is_refused_by_flag(text_fp8: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ("--device", "cpu", "--port", "0", "--tp", "2", "--dist-init-addr", place)
        assert_refused(in_a_process("serve", "--model", text_fp8, *flags), f"--dist-init-addr {place}", "in use")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("chat_template.jinja", b"{% if %}", ["chat template does not compile", "line 1"]),
        ("chat_template.jinja", b"\xff", ["chat_template.jinja", "UTF-8"]),
        ("tokenizer_config.json", b"[]", ["tokenizer_config.json", "JSON object"]),
    ],
)
def test_a_broken_neighbour_of_the_tokenizer_is_refused_before_anything_starts(
    here: Callable[..., Run], text_fp8: Path, tmp_path: Path, name: str, content: bytes, words: list[str]
) -> None:
    for file in text_fp8.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(content)
    assert_refused(here("serve", "--model", tmp_path, "--port", "0", "--device", "cpu"), *words)


def test_a_tokenizer_that_hides_what_a_parser_reads_is_refused_before_anything_starts(
    here: Callable[..., Run], text_fp8: Path, tmp_path: Path
) -> None:
    for file in text_fp8.iterdir():
        (tmp_path / file.name).symlink_to(file)
    tokenizer = json.loads((text_fp8 / "tokenizer.json").read_text(encoding="utf-8"))
    for token in tokenizer["added_tokens"]:
        token["special"] = True
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    serve = ("serve", "--model", tmp_path, "--port", "0", "--device", "cpu")
    assert_refused(here(*serve, "--reasoning-parser", "qwen3"), "--reasoning-parser qwen3", "<think>")
    assert_refused(here(*serve, "--tool-call-parser", "qwen3_coder"), "--tool-call-parser qwen3_coder", "<tool_call>")


def test_places_that_cannot_be_written_to_are_refused_by_name(
    here: Callable[..., Run], text_fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = text_fp8 / "config.json" / "below"
    assert_refused(here("serve", "--model", text_fp8, "--port", "0", "--trace", place), f"--trace {place}")
    assert_refused(here("make-checkpoint", "--layout", "dense", "--mtp", "none", "--out", place), str(place))
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert_refused(here("serve", "--model", text_fp8, "--port", "0"), "too long for a socket", "TMPDIR")
    assert not list(long.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(long / "absent"))
    assert_refused(here("serve", "--model", text_fp8, "--port", "0"), "TMPDIR")


FAILING_SERVER = """
import sys
from rocm_serve import cli, compose
from rocm_serve.errors import UserError
def run(*_, **__):
    raise UserError("no server today")
compose.run = run
cli.main()
"""


def test_an_error_beside_a_core_that_loads_is_still_one_line_and_exit_code_2(text_fp8: Path) -> None:
    command = [sys.executable, "-c", FAILING_SERVER, "serve", "--model", str(text_fp8), "--port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert_refused(run, "no server today")


@pytest.mark.parametrize("flags", [[], ["--tp", "2"]])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_start_that_is_told_to_stop_ends_with_0_and_leaves_nothing(
    text_fp8: Path, tmp_path: Path, flags: list[str], number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "rocm_serve", "serve", "--model", str(text_fp8), "--port", "0", *flags]
    with tempfile.TemporaryDirectory(prefix="f") as short:  # sockets want short paths
        env = {**os.environ, "TMPDIR": short}
        server = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        while server.poll() is None and not list(Path(short).glob("rocm-serve-*")):
            time.sleep(0.005)
        server.send_signal(number)
        said, _ = server.communicate(timeout=120)
        assert server.returncode == 0, said
        assert b"Traceback" not in said
        assert not list(Path(short).iterdir())


def test_a_damaged_checkpoint_is_refused_from_its_headers(
    here: Callable[..., Run], text_fp8: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(text_fp8, damaged)
    shard = sorted(damaged.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert_refused(here("serve", "--model", damaged, "--port", "0", "--device", "cpu"), shard.name, "truncated")
    shard.unlink()
    assert_refused(here("serve", "--model", damaged, "--port", "0", "--device", "cpu"), shard.name)


def test_what_mori_would_stumble_over_is_asked_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, text_fp8: Path, tmp_path: Path
) -> None:
    asked: list[tuple[int, bool]] = []

    def check(
        facts: object, plan: ExpertPlan, resolved: object, *, compute_units: int, environ: dict[str, str]
    ) -> None:
        asked.append((plan.ep, "PATH" in environ))

    monkeypatch.setattr(compose, "check_mori", check)
    compose.prepare(ServeConfig(model=str(text_fp8), device="cpu", tp=2, ep=2), tmp_path)
    assert asked == [(2, True)]


def test_a_wish_that_another_rules_out_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text_fp8: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(probe, "probe", lambda device: MI300X)
    compose.prepare(ServeConfig(model=str(text_fp8), op={"gdn_step": "triton", "gdn_decode": "triton"}), tmp_path)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned[-1].startswith("--op gdn_decode=triton has no effect: --op gdn_step=triton ")


def test_plan_counts_the_checkpoint_and_every_rank(here: Callable[..., Run], text_fp8: Path) -> None:
    run = here("plan", "--model", text_fp8, "--tp", "2", "--pp", "2")
    assert run.returncode == 0, run.stderr
    head, mesh, *ranks = run.stdout.splitlines()
    assert head.startswith("Qwen3_5MoeForCausalLM: ")
    assert "legal tp: 1, 2, 4" in mesh
    assert [line.split(" (")[0] for line in ranks] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert_refused(here("plan", "--model", text_fp8, "--tp", "5"), "tp 5", "legal: 1, 2, 4")


def test_plan_ends_with_0_when_it_fits_1_when_not_and_2_when_it_cannot_be(
    here: Callable[..., Run], text_fp8: Path
) -> None:
    launch = ("plan", "--model", text_fp8 / "config.json", "--tp", "2", "--pp", "2")
    fits = here(*launch, "--gpu", "mi300x", "--nnodes", "2", "--context-len", "512")
    assert (fits.returncode, fits.stdout.splitlines()[-1]) == (0, "fits"), fits.stderr
    too_small = here(*launch, "--hbm-gib", "1.1")
    assert too_small.returncode == 1
    assert too_small.stdout.splitlines()[-1].startswith("does not fit: ")
    as_json = here(*launch, "--hbm-gib", "1.1", "--json")
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout)["why"] in too_small.stdout
    assert_refused(here(*launch, "--gpu", "mi300x", "--nnodes", "4"), "--tp 2", "legal --nnodes")
    assert_refused(here(*launch, "--gpu", "gtx"), "--gpu gtx", "mi300x")
    assert_refused(here(*launch, "--json"), "--gpu NAME")
    assert_refused(here(*launch, "--gpu", "h200", "--kv-cache-dtype", "int4"), "--kv-cache-dtype", "fp8_e4m3")


def test_plan_takes_the_flags_of_a_launch_and_names_those_that_mean_nothing_to_it(
    here: Callable[..., Run], text_fp8: Path
) -> None:
    ours = here("plan", "--model", text_fp8, "--tp", "2", "--hbm-gib", "8", "--mem-fraction", "0.5", "--json")
    flags = ("--model-path", text_fp8, "--tp-size", "2", "--mem-fraction-static", "0.5", "--port", "9001", "--json")
    theirs = here("plan", *flags, "--disable-radix-cache", "--hbm-gib", "8", "--watchdog-timeout", "1200")
    assert (theirs.returncode, theirs.stdout) == (0, ours.stdout), theirs.stderr
    assert theirs.stderr.splitlines() == [
        "--disable-radix-cache has no effect: there is no prefix cache: every prompt is computed",
        "no meaning for `plan`: --port, --watchdog-timeout",
    ]
    plain, local, sent = (
        here("plan", "--model", text_fp8, "--tp", "2", *flags)
        for flags in ((), ("--ep", "2"), ("--ep", "2", "--expert-exchange", "torch"))
    )
    assert [run.stderr for run in (plain, local, sent)] == ["", "", ""], "weights depend on both"
    assert "with ep 2" in local.stdout and local.stdout.splitlines()[2] == plain.stdout.splitlines()[2]
    assert sent.stdout.splitlines()[2] != local.stdout.splitlines()[2], "its shared expert is whole"
    without_gpu = here("plan", "--model-path", text_fp8, "--tp-size", "2", "--page-size", "32")
    assert without_gpu.returncode == 0
    assert "not looked at: --page-size" in without_gpu.stderr
    assert_refused(here("plan", "--model", text_fp8, "--hbm-gib", "8", "--ep-size", "2"), "--ep 2", "--ep-size")
    assert_refused(here("plan", "--model", text_fp8, "--gpu", "mi999"), "--gpu mi999: legal: mi300x", "--hbm-gib N")


def test_a_report_of_nothing_is_one_line_and_exit_code_2(here: Callable[..., Run], tmp_path: Path) -> None:
    run = here("report", "--run-dir", tmp_path, "--out", tmp_path / "out.tar.gz")
    assert_refused(run, str(tmp_path), "is no run directory")
    assert not (tmp_path / "out.tar.gz").exists()


def test_make_checkpoint_writes_the_same_bytes_for_the_same_seed(
    here: Callable[..., Run], text_fp8: Path, tmp_path: Path
) -> None:
    run = here("make-checkpoint", "--layout", "text-fp8", "--mtp", "bf16", "--out", tmp_path / "again")
    assert run.returncode == 0, run.stderr
    names = sorted(path.name for path in text_fp8.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in names:
        assert (text_fp8 / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--layout", "gguf"], ["layout 'gguf'", "text-fp8"]),
        (["--layout", "text-bf16", "--mtp", "fp8"], ["mtp 'fp8'", "bf16, none"]),
        (["--layout", "dense", "--dims", "huge"], ["dims 'huge'", "default"]),
    ],
)
def test_a_checkpoint_that_nobody_published_is_refused(
    here: Callable[..., Run], tmp_path: Path, flags: list[str], words: list[str]
) -> None:
    assert_refused(here("make-checkpoint", "--out", tmp_path / "x", *flags), *words)
