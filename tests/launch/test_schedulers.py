"""The Slurm script and the Kubernetes manifest: linted, and what they start is what two_node.sh is promised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SBATCH = ROOT / "launch" / "slurm" / "two_node.sbatch"
MANIFEST = ROOT / "launch" / "k8s" / "leaderworkerset.yaml"
SHELL = sorted(p for p in (ROOT / "launch").rglob("*") if p.suffix in (".sh", ".sbatch"))

FAKE_SRUN = """#!/usr/bin/env bash
# Runs the command once for each node that is asked for, as srun would, with the node's number in SLURM_NODEID.
nodes=2
while [[ $1 == --* ]]; do [[ $1 == --nodes=* ]] && nodes=${1#--nodes=}; shift; done
for ((node = 0; node < nodes; node++)); do SLURM_NODEID=$node "$@" || exit; done
"""


@pytest.mark.parametrize("script", SHELL, ids=lambda p: p.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    run = subprocess.run([BIN / "shellcheck", script], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout + run.stderr) == (0, "")


def test_yamllint_has_nothing_to_say() -> None:
    command = [sys.executable, "-m", "yamllint", "--strict", "launch"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (run.returncode, run.stdout + run.stderr) == (0, "")


def run_sbatch(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the batch script as Slurm does: from a spooled copy, with fake srun, scontrol and two_node.sh."""
    project, tools = tmp_path / "project", tmp_path / "bin"
    (project / "launch" / "slurm").mkdir(parents=True)
    tools.mkdir()
    files = {
        project / "launch" / "two_node.sh": '#!/usr/bin/env bash\nprintf "node"; printf " [%s]" "$@"; echo\n',
        project / "launch" / "slurm" / "own_address.sh": "#!/usr/bin/env bash\necho 10.1.2.3\n",
        tools / "srun": FAKE_SRUN,
        tools / "scontrol": '#!/usr/bin/env bash\n[[ $* == "show hostnames n[07-08]" ]] && printf "n07\\nn08\\n"\n',
        tmp_path / "slurm_script": SBATCH.read_text(encoding="utf-8"),
    }
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    env = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(project),
        "SLURM_JOB_NODELIST": "n[07-08]",
    }
    command = ["bash", str(tmp_path / "slurm_script"), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=tmp_path)


def test_the_batch_job_starts_two_node_sh_on_each_node_with_one_address(tmp_path: Path) -> None:
    run = run_sbatch(tmp_path, "/models/a b", "--port", "9001", "--served-model-name", "it's")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "node 0 is n07, 10.1.2.3",
        "node [10.1.2.3] [0] [/models/a b] [--port] [9001] [--served-model-name] [it's]",
        "node [10.1.2.3] [1] [/models/a b] [--port] [9001] [--served-model-name] [it's]",
    ]


def test_a_batch_job_without_a_model_says_how_to_call_it(tmp_path: Path) -> None:
    run = run_sbatch(tmp_path)
    assert run.returncode == 2 and "usage: sbatch" in run.stderr


def test_an_own_address_leaves_the_host(tmp_path: Path) -> None:
    script = ROOT / "launch" / "slurm" / "own_address.sh"
    fake = tmp_path / "ip"

    def address(route: str) -> subprocess.CompletedProcess[str]:
        fake.write_text(f"#!/usr/bin/env bash\necho '{route}'\n", encoding="utf-8")
        fake.chmod(0o755)
        env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run(["bash", script], capture_output=True, text=True, check=False, env=env)

    assert address("192.0.2.1 via 10.0.0.1 dev ens3 src 10.0.0.7 uid 0").stdout == "10.0.0.7\n"
    for route in ("local 192.0.2.1 dev lo src 127.0.0.1 uid 0", ""):
        refused = address(route)
        assert refused.returncode == 1 and "FABRIC_PEER" in refused.stderr


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    return {d["kind"]: d for d in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}


def test_a_group_of_two_is_made_anew_when_a_pod_ends_and_is_ready_when_its_leader_is(documents: dict[str, Any]) -> None:
    template = documents["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert (template["size"], template["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    (leader,) = template["leaderTemplate"]["spec"]["containers"]
    (worker,) = template["workerTemplate"]["spec"]["containers"]
    port = int(leader["args"][leader["args"].index("--port") + 1])
    assert leader["readinessProbe"]["httpGet"] == {"path": "/ready", "port": port}
    assert "readinessProbe" not in worker and "livenessProbe" not in leader | worker
    service = documents["Service"]["spec"]
    assert service["selector"].items() <= template["leaderTemplate"]["metadata"]["labels"].items()
    assert not service["selector"].items() <= template["workerTemplate"]["metadata"]["labels"].items()
    assert leader["ports"][0] == {"name": service["ports"][0]["targetPort"], "containerPort": port}


def test_both_pods_have_gpus_rdma_shared_memory_and_the_same_launch(documents: dict[str, Any]) -> None:
    template = documents["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    commands = []
    for name in ("leaderTemplate", "workerTemplate"):
        spec = template[name]["spec"]
        (container,) = spec["containers"]
        assert {"amd.com/gpu": "8", "rdma/hca": "8"}.items() <= container["resources"]["limits"].items()
        assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
        mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
        volumes = {v["name"]: v for v in spec["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert spec["hostNetwork"] and spec["hostIPC"]
        commands.append(container["command"])
    leader, worker = commands
    assert leader[0] == worker[0] == "launch/two_node.sh" and leader[3] == worker[3]
    assert (leader[1], leader[2], worker[1], worker[2]) == ("$(POD_IP)", "0", "$(LWS_LEADER_ADDRESS)", "1")
