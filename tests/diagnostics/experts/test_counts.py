"""Count files: what is added up, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rocm_serve.diagnostics.experts.counts import CountFile, LayerCount, check_free, file_of_rank, read_counts
from rocm_serve.errors import UserError
from rocm_serve.parallel.expert_map import DRAFT_LAYER
from tests.diagnostics.experts.made import SHAPE, count_file, write_pair

NOTHING = LayerCount(tokens=0, chosen=(0,) * 16)


def refused(sentence: str, *paths: Path) -> None:
    with pytest.raises(UserError) as error:
        read_counts(paths)
    assert re.search(sentence, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


def test_the_name_that_the_server_was_given_stands_for_the_files_of_all_ranks(tmp_path: Path) -> None:
    a, b = write_pair(tmp_path)
    (tmp_path / "counts.rank-x.json").write_text("not one of them")
    counts = read_counts([tmp_path / "counts.json"])
    assert [path.name for path in counts.files] == ["counts.rank-0.json", "counts.rank-1.json"]
    assert counts == read_counts([tmp_path / "counts.rank-0.json", tmp_path / "counts.rank-1.json"])
    assert counts.model == SHAPE and counts.tokens == 100
    for layer, count in counts.layers.items():
        both = zip(a.layers[layer].chosen, b.layers[layer].chosen, strict=True)
        assert count.chosen == tuple(x + y for x, y in both)


def test_several_runs_add_up(tmp_path: Path) -> None:
    write_pair(tmp_path, "a.json", seed=1)
    write_pair(tmp_path, "b.json", seed=2)
    assert read_counts([tmp_path / "a.json", tmp_path / "b.json"]).tokens == 200
    count_file(0, counting=(0,)).write(file_of_rank(tmp_path / "c.json", 0))  # a run with another exchange
    assert read_counts([tmp_path / "a.json", tmp_path / "c.json"]).tokens == 150


def test_stages_count_their_own_layers_and_the_draft_layer_other_tokens(tmp_path: Path) -> None:
    whole = count_file(tokens=9)
    first = count_file(0, pp=2, counting=(0,), layers={0: whole.layers[0], 1: whole.layers[1]})
    draft = count_file(5, tokens=3).layers[0]
    last = count_file(2, pp=2, stage=1, counting=(2,), layers={DRAFT_LAYER: draft, 2: whole.layers[2]})
    for one in (first, last):
        one.write(file_of_rank(tmp_path / "c", one.rank))
    counts = read_counts([tmp_path / "c"])
    assert list(counts.layers) == [-1, 0, 1, 2] and counts.tokens == 9 and counts.layers[-1].tokens == 3


def test_sets_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    write_pair(tmp_path)
    zero, one = tmp_path / "counts.rank-0.json", tmp_path / "counts.rank-1.json"
    refused("rank 1 counted too, and no file of it was given", zero)
    refused("rank 0 counted too, and no file of it was given", one)
    refused("given twice", zero, one, tmp_path / "." / "counts.rank-0.json")
    write_pair(tmp_path, "more.json", seed=1)
    refused("rank 1 counted too, and only 1 of 2 files", zero, one, tmp_path / "more.rank-0.json")
    alone = tmp_path / "stage.json"
    count_file(0, pp=2, counting=(0,)).write(alone)
    refused("no file of stage 1 was given, of 2 stages", alone)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": SHAPE_OTHER}, "is of .*, 4 layers of 32 experts.* of .*4 layers of 16.*one model")
        for SHAPE_OTHER in [msgspec.structs.replace(SHAPE, num_experts=32)]
    ]
    + [({"tp": 4}, "was counted at --tp 4 --pp 1, .* at --tp 2 --pp 1")],
)
def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    width = changes["model"].num_experts if "model" in changes else 16
    layers = {0: LayerCount(tokens=1, chosen=(1,) * 4 + (0,) * (width - 4))}
    count_file(0).write(tmp_path / "a")
    count_file(1, **changes, layers=layers).write(tmp_path / "b")
    refused(sentence, tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rank": 7}, "contradicts itself: rank 7 of stage 0"),
        ({"stage": 1}, "contradicts itself: rank 0 of stage 1"),
        ({"layers": {4: NOTHING}}, "contradicts itself: it counts layer 4 of 4"),
        ({"layers": {-2: NOTHING}}, "contradicts itself: it counts layer -2 of 4"),
        ({"layers": {0: LayerCount(tokens=0, chosen=(0,) * 15)}}, "layer 0 counts 15 experts of 16"),
        ({"layers": {0: LayerCount(tokens=5, chosen=(1,) * 16)}}, "in layer 0 5 tokens chose 16 times, not 4 times"),
        ({"layers": {0: NOTHING}, "counting": (0,)}, "no token was counted in "),
        ({"layers": {}, "counting": (0,)}, "no token was counted in "),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    path = tmp_path / "counts.json"
    count_file(**changes).write(path)
    refused(sentence, path)


def damaged(change: dict[str, Any]) -> bytes:
    whole = msgspec.json.decode(msgspec.json.encode(count_file()))
    return msgspec.json.encode(whole | change)


LAYER = {"tokens": 4, "chosen": [1] * 16}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is no 'rocm-serve expert counts' file, or only a part of one"),
        (msgspec.json.encode(count_file())[:-40], "or only a part of one"),
        (b"\xff\xfe\x00", "or only a part of one"),
        (b"[" * 100_000, "or only a part of one"),
        (b"{}", "is no 'rocm-serve expert counts' file: its format is ''"),
        (b'{"format": "rocm-serve expert placement", "version": 1}', "its format is 'rocm-serve expert placement'"),
        (damaged({"version": 2}), "has version 2 of its format; this rocm-serve reads version 1"),
        (damaged({"surplus": 1}), "is damaged: .*surplus"),
        (damaged({"layers": {"0": LAYER | {"chosen": [-1] * 16}}}), "is damaged: .*>= 0"),
        (damaged({"layers": {"0": LAYER | {"tokens": 4.5}}}), "is damaged: .*int"),
        (damaged({"layers": {"first": LAYER}}), "is damaged: "),
        (damaged({"tp": 0}), "is damaged: .*>= 1"),
    ],
)
def test_what_is_no_count_file_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "counts.json"
    path.write_bytes(content)
    refused(sentence, path)


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    refused(r"no such file, and none of a rank beside it \(x.rank-0.json\)", tmp_path / "x.json")
    refused("no such file", tmp_path / "no" / "x.json")
    refused("no such file", tmp_path)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    count_file(seed=1).write(path)
    count_file(seed=2).write(path)
    assert msgspec.json.decode(path.read_bytes(), type=CountFile) == count_file(seed=2)
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_an_earlier_run_has_used_is_refused_before_anything_starts(tmp_path: Path) -> None:
    check_free(tmp_path / "counts.json")
    write_pair(tmp_path)
    check_free(tmp_path / "other.json")
    with pytest.raises(UserError, match=r"counts.rank-0.json is there already.*legal: another name"):
        check_free(tmp_path / "counts.json")
    for path in (tmp_path, tmp_path / "no" / "x.json"):
        with pytest.raises(UserError, match="Is a directory; legal: a file|No such file or directory"):
            check_free(path)
