"""Which ranks a process starts: by flags, or as torchrun or srun say."""

from __future__ import annotations

import msgspec
import pytest

from rocm_serve.config.launcher import Membership, join_address, membership, split_address
from rocm_serve.config.schema import ServeConfig
from rocm_serve.errors import UserError

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NODEID": "1"}


def place(environ: dict[str, str] | None = None, **wishes: object) -> Membership:
    return membership(msgspec.convert({"model": "m"} | wishes, ServeConfig), environ or {})


def where(found: Membership) -> tuple[int, ...]:
    return found.nnodes, found.node_rank, found.members, found.member, found.first_device


def test_alone_there_is_one_member_whatever_a_shell_has_left_in_the_environment() -> None:
    assert where(place()) == (1, 0, 1, 0, 0)
    assert where(place(SRUN)) == (1, 0, 1, 0, 0), "one rank needs no launcher"
    alone = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    assert where(place(alone)) == (1, 0, 1, 0, 0)
    job = {"SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert where(place(job, tp=4)) == (1, 0, 1, 0, 0)
    assert where(place({"RANK": "1", "WORLD_SIZE": "2"}, tp=4)) == (1, 0, 1, 0, 0), "no LOCAL_RANK: not torchrun's"


def test_by_flags_a_member_is_a_host() -> None:
    found = place(tp=4, pp=2, nnodes=2, node_rank=1, dist_init_addr="h:1")
    assert where(found) == (2, 1, 2, 1, 0) and found.init_addr == "h:1"


def test_the_flag_wins_over_any_launcher() -> None:
    wishes = {"tp": 4, "pp": 2, "nnodes": 2, "node_rank": 0, "dist_init_addr": "h:1"}
    assert where(place(TORCHRUN | SRUN, **wishes)) == (2, 0, 2, 0, 0)


def test_under_torchrun_a_member_is_a_rank_and_its_store_keeps_its_port() -> None:
    found = place(TORCHRUN | MASTER, tp=4, pp=2)
    assert where(found) == (2, 1, 8, 5, 1) and found.init_addr == "10.0.0.1:29501"
    assert place(TORCHRUN | MASTER, tp=4, pp=2, dist_init_addr="h:7").init_addr == "h:7"


def test_a_task_of_srun_is_a_rank_when_there_are_as_many_and_else_a_host() -> None:
    assert where(place(SRUN, tp=4, pp=2, nnodes=2, dist_init_addr="h:1")) == (2, 1, 8, 5, 1)
    per_host = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
    found = place(per_host, tp=4, pp=2, nnodes=2, dist_init_addr="h:1")
    assert where(found) == (2, 1, 2, 1, 0) and found.reasons["node_rank"] == "SLURM_NODEID"
    one_rank_a_host = place(per_host, tp=1, pp=2, nnodes=2, dist_init_addr="h:1")
    assert where(one_rank_a_host) == (2, 1, 2, 1, 0)


@pytest.mark.parametrize(
    ("environ", "wishes", "words"),
    [
        ({}, {"nnodes": 2, "tp": 2}, ["--nnodes 2 needs --node-rank; legal: 0..1"]),
        ({}, {"nnodes": 0}, ["--nnodes 0: legal: 1 and more"]),
        ({}, {"node_rank": 1}, ["--node-rank 1: legal with --nnodes 1: 0"]),
        ({}, {"nnodes": 2, "node_rank": 2}, ["--node-rank 2: legal with --nnodes 2: 0..1"]),
        ({}, {"nnodes": 2, "node_rank": 0, "pp": 3}, ["--nnodes 2: 3 ranks", "legal: 1, 3"]),
        ({}, {"nnodes": 4, "node_rank": 0, "tp": 4, "pp": 2}, ["a stage may not span nodes", "legal", "1, 2"]),
        ({}, {"nnodes": 2, "node_rank": 0, "pp": 2}, ["--dist-init-addr HOST:PORT"]),
        ({}, {"nnodes": 2, "node_rank": 0, "pp": 2, "dist_init_addr": "h:65533"}, ["legal: up to 65532"]),
        (TORCHRUN | MASTER, {"tp": 4}, ["torchrun started 8 processes", "--tp 4 x --pp 1 the number of ranks is 4"]),
        (TORCHRUN | MASTER, {}, ["torchrun started 8 processes", "--tp 1 x --pp 1 the number of ranks is 1"]),
        (TORCHRUN, {"tp": 4, "pp": 2}, ["--dist-init-addr HOST:PORT"]),
        (TORCHRUN | MASTER | {"RANK": "x"}, {"tp": 4, "pp": 2}, ["RANK='x' is no number"]),
        (TORCHRUN | MASTER | {"RANK": "8"}, {"tp": 4, "pp": 2}, ["RANK=8: legal: 0..7"]),
        (TORCHRUN | MASTER, {"tp": 4, "pp": 2, "nnodes": 4}, ["--nnodes 4: torchrun runs 4 of 8 ranks"]),
    ],
)
def test_what_cannot_be_is_one_line_with_the_legal_values(
    environ: dict[str, str], wishes: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        place(environ, **wishes)
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    ("text", "parts"), [("h:1", ("h", 1)), ("[::1]:99", ("::1", 99)), ("10.0.0.1:5", ("10.0.0.1", 5))]
)
def test_addresses_come_apart_and_together(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts
    assert join_address(*parts) == text
