"""The image: linted, its packages exist for Python 3.12, and nothing replaces the torch that AMD's image brings."""

from __future__ import annotations

import email
import json
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_wheel
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile.rocm"
BIN = Path(sys.executable).parent
PLATFORMS = ("2_39", "2_35", "2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")
OFFLINE = re.compile(r"NewConnectionError|Failed to establish|name resolution|NameResolutionError|ConnectTimeout")
NEEDED_AT_RUN = (
    "--device /dev/kfd --device /dev/dri --device /dev/infiniband --network host --ipc host --group-add video"
    " --cap-add SYS_PTRACE --cap-add IPC_LOCK --security-opt seccomp=unconfined --ulimit memlock=-1"
    " --ulimit nofile=1048576"
)


def text() -> str:
    """The Dockerfile with continued lines joined."""
    return DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")


def arguments() -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+)=(\S+)$", text(), re.MULTILINE))


def pip_requirements() -> list[list[str]]:
    """What each `pip install` of the Dockerfile asks a registry for."""
    lines = []
    for command in re.findall(r"pip install ([^&\n]*)", text()):
        for name, value in arguments().items():
            command = command.replace("${" + name + "}", value)
        lines.append([word for word in shlex.split(command) if re.match(r"[\w-]+==", word)])
    return [line for line in lines if line]


def project() -> dict[str, list[str]]:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"": data["dependencies"], **data["optional-dependencies"]}


def test_hadolint_has_nothing_to_say() -> None:
    run = subprocess.run([BIN / "hadolint", DOCKERFILE], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout + run.stderr) == (0, "")


def test_the_base_is_pinned_to_python_3_12_and_rocm_7_2_2_or_later() -> None:
    (base,) = re.findall(r"^FROM (\S+)$", text(), re.MULTILINE)
    rocm, torch = re.fullmatch(
        r"rocm/pytorch:rocm([\d.]+)_ubuntu24\.04_py3\.12_pytorch_release_([\d.]+)", base
    ).groups()  # type: ignore[union-attr]
    assert tuple(map(int, rocm.split("."))) >= (7, 2, 2)
    assert (2, 9) <= tuple(map(int, torch.split(".")))[:2] < (2, 15)  # what the README says is meant


def test_mori_and_aiter_are_pinned() -> None:
    assert arguments() == {"MORI_VERSION": "1.2.4", "AITER_VERSION": "v0.1.20.post1"}
    assert ["amd-mori==1.2.4"] in pip_requirements()


def test_the_last_step_is_the_check_of_itself() -> None:
    runs = re.findall(r"^RUN (.*)$", text(), re.MULTILINE)
    assert runs[-1] == "rocm-serve version && python3 launch/image_check.py"
    for copied in re.findall(r"^COPY (\S+) (\S+)$", text(), re.MULTILINE):
        assert copied[0] == copied[1] and (ROOT / copied[0]).exists()


def test_the_docker_run_line_gives_devices_memory_and_shared_memory() -> None:
    header = DOCKERFILE.read_text(encoding="utf-8").split("FROM ")[0].replace("\\\n#", " ")
    (line,) = [line for line in header.splitlines() if "docker run" in line]
    words = " ".join(line.split())
    for flag in re.findall(r"--\S+ \S+", NEEDED_AT_RUN):
        assert flag in words
    shm = re.search(r"--shm-size (\d+)g", words)
    assert shm is not None and int(shm[1]) >= 64


def test_an_image_without_rocm_fails_its_check_and_every_line_says_what_is_missing() -> None:
    command = [sys.executable, "launch/image_check.py"]
    env = {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert run.returncode == 1 and run.stderr == ""
    said = dict(line.split(": ", 1) for line in run.stdout.splitlines())
    assert [name.split(None, 1)[1] for name in said] == [
        *("python", "rocm", "torch", "mori", "aiter", "rdma providers", "rocm_serve")
    ]
    assert "amd-mori" in said["FAILED  mori"]
    assert "mlx5, bnxt_re" in said["FAILED  rdma providers"]


def test_the_extra_rocm_brings_neither_torch_nor_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    wheel = tmp_path / build_wheel(str(tmp_path))
    with zipfile.ZipFile(wheel) as files:
        (name,) = [n for n in files.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(files.read(name))
    assert "rocm" in metadata.get_all("Provides-Extra", [])
    required = metadata.get_all("Requires-Dist", [])
    asked = [line for line in required if "extra ==" not in line or "'rocm'" in line or "'test'" in line]
    assert len(asked) >= len(project()[""])
    names = {re.split(r"[^\w.-]", line)[0].lower() for line in asked}
    assert not [n for n in names if n in ("torch", "triton") or n.startswith(("torch", "pytorch-triton", "nvidia"))]
    assert any("torch" in line and "'cuda'" in line for line in required)  # the reading itself sees torch


@pytest.mark.slow
def test_every_package_of_the_image_exists_for_cp312() -> None:
    ours = project()
    for asked in [*pip_requirements(), [*ours[""], *ours["rocm"], *ours["test"]]]:
        command = [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--target", "nowhere"),
            *("--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:", "--no-warn-conflicts"),
            *(word for version in PLATFORMS for word in ("--platform", f"manylinux_{version}_x86_64")),
            *("--platform", "manylinux2014_x86_64", "--platform", "linux_x86_64", "--disable-pip-version-check"),
            *("--quiet", "--report", "-"),
            *asked,
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        if run.returncode and OFFLINE.search(run.stdout + run.stderr):
            pytest.skip("no package index can be reached")
        assert run.returncode == 0, run.stderr[-2000:]
        report = json.loads(run.stdout)
        brought = {canonicalize_name(item["metadata"]["name"]) for item in report["install"]}
        assert {canonicalize_name(re.split(r"[^\w.-]", word)[0]) for word in asked} <= brought
        assert not brought & {"torch", "triton"}
