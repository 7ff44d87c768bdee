"""Signs of progress: what is beaten is what is read, and every layer of a model beats."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from rocm_serve.executor.heartbeat import Heartbeat, Phase, Progress, heartbeat_file, read_progress
from rocm_serve.executor.runner import phase_of, watch_layers
from rocm_serve.messages import Plan, Work


def test_a_process_that_has_not_begun_is_starting(tmp_path: Path) -> None:
    path = heartbeat_file(str(tmp_path), "rank-0")
    path.touch()
    assert read_progress(path) == Progress(0, -1, -1, Phase.STARTING)


def test_what_is_beaten_is_what_is_read(tmp_path: Path) -> None:
    path = heartbeat_file(str(tmp_path), "rank-0")
    heart = Heartbeat(path)
    heart.enter(Phase.LOADING)
    assert read_progress(path).where() == "loading"
    heart.enter(Phase.PREFILL, 12)
    heart.layer(37)
    seen = read_progress(path)
    assert (seen.step, seen.layer, seen.phase) == (12, 37, Phase.PREFILL)
    assert seen.where() == "step 12, layer 37 (prefill)"
    heart.enter(Phase.IDLE)
    assert (read_progress(path).step, read_progress(path).layer) == (12, -1)


def test_work_before_the_first_plan_is_warming_up(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path / "x.beat")
    heart.enter(Phase.WARMING_UP)
    assert heart.progress.where() == "warming up"
    heart.enter(Phase.PREFILL)
    heart.layer(3)
    assert heart.progress.where() == "warming up: prefill, layer 3"
    heart.enter(Phase.IDLE)
    assert heart.progress.where() == "serving, idle"


def test_every_beat_counts_also_where_nothing_else_changes(tmp_path: Path) -> None:
    path = tmp_path / "x.beat"
    heart = Heartbeat(path)
    counts = {read_progress(path).beats}
    for beat in (heart.tick, lambda: heart.layer(1), lambda: heart.layer(1), lambda: heart.enter(Phase.IDLE)):
        beat()
        counts.add(read_progress(path).beats)
    assert len(counts) == 5
    assert heart.progress == read_progress(path)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("4", "5")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def test_every_decoder_layer_beats_with_its_number_when_it_begins() -> None:
    heart = Heartbeat()
    model = nn.ModuleDict({"model": Decoder()})
    seen: list[int] = []
    watch_layers(model, heart)  # type: ignore[arg-type]
    for layer in model["model"].layers.values():  # type: ignore[union-attr]
        layer.register_forward_hook(lambda *_: seen.append(heart.progress.layer))
    before = heart.progress.beats
    model["model"](torch.zeros(1, 2))
    assert seen == [4, 5]
    assert heart.progress.beats == before + 2


def test_a_step_is_named_after_its_rows() -> None:
    prompt, after = Work(0, 0, 3, False, True, 1), Work(1, 3, 1, True, True, 2)
    assert phase_of(Plan(0, (prompt,))) is Phase.PREFILL
    assert phase_of(Plan(0, (after,))) is Phase.DECODE
    assert phase_of(Plan(0, (after, prompt))) is Phase.MIXED
