"""From shares of ranks to wholes, and from wholes to the first site that differs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from rocm_serve.diagnostics.parity.drive import RUN_SEEDS
from rocm_serve.diagnostics.parity.localise import (
    Apart,
    Recorded,
    Share,
    compare,
    first_divergence,
    near_ties,
    share_of,
    whole,
)
from rocm_serve.diagnostics.parity.tap_files import Band, Header, Site, step_file

KEY = (0, 5)


def site(name: str, layer: int = 0, *, bands: tuple[Band, ...] = (), addend: bool = False, rows: int = 1) -> Site:
    return Site(layer, name, name, tuple((0, 5 + i) for i in range(rows)), bands, addend)


def write(folder: Path, rank: int, tp: int, *made: tuple[Site, list[list[float]]]) -> None:
    path = step_file(folder, rank, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = msgspec.json.encode(Header(rank, rank, tp, tuple(one for one, _ in made))).decode()
    tensors = {str(i): np.array(rows, dtype=np.float32) for i, (_, rows) in enumerate(made)}
    save_file(tensors, path, metadata={"header": header})


def apart(layer: int, name: str, relative: float) -> Apart:
    return Apart(layer, name, name, relative, relative, 0, 5, (0,))


def test_bands_are_laid_side_by_side_and_repeated_ones_taken_once() -> None:
    bands = (Band(2), Band(1, repeat=2))
    rows = [np.array([10 * r, 10 * r + 1, 100 + r // 2], dtype=np.float32) for r in range(4)]
    shares = [Share(r, r, site("qkv", bands=bands), rows[r]) for r in range(4)]
    total = whole(shares)
    assert total.tolist() == [0, 1, 10, 11, 20, 21, 30, 31, 100, 101]
    for share in shares:
        expected = share_of(total, share, 4)
        assert expected is not None and expected.tolist() == share.row.tolist()


def test_addends_are_summed() -> None:
    shares = [Share(r, r, site("down", addend=True), np.array([1.0, r], dtype=np.float32)) for r in range(2)]
    assert whole(shares).tolist() == [2.0, 1.0]
    assert share_of(whole(shares), shares[0], 2) is None


def test_two_topologies_are_compared_by_what_the_shares_make_up(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write(one, 0, 1, (site("norm"), [[1, 2]]), (site("up", bands=(Band(4),)), [[1, 2, 3, 4]]))
    write(two, 0, 2, (site("norm"), [[1, 2]]), (site("up", bands=(Band(2),)), [[1, 2]]))
    write(two, 1, 2, (site("norm"), [[1, 2]]), (site("up", bands=(Band(2),)), [[3, 9]]))
    found = list(compare(Recorded(two, 0), Recorded(one, 0), 1e-4, {}))
    assert [(sight.site, sight.ranks) for sight in found] == [("norm", ()), ("up", (1,))]
    assert found[0].relative == 0.0 and found[1].absolute == 5.0


def test_a_rank_whose_copy_differs_is_named_though_rank_0_agrees(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write(one, 0, 1, (site("norm"), [[1, 2]]))
    write(two, 0, 2, (site("norm"), [[1, 2]]))
    write(two, 1, 2, (site("norm"), [[1, 3]]))
    (found,) = compare(Recorded(two, 0), Recorded(one, 0), 1e-4, {})
    assert found.ranks == (1,) and found.relative > 0.1


def test_numbers_that_are_none_differ_wholly(tmp_path: Path) -> None:
    write(tmp_path / "a", 0, 1, (site("norm"), [[float("nan"), 2]]))
    write(tmp_path / "b", 0, 1, (site("norm"), [[1, 2]]))
    (found,) = compare(Recorded(tmp_path / "a", 0), Recorded(tmp_path / "b", 0), 1e-4, {})
    assert found.relative == float("inf")


def test_rows_of_other_runs_and_from_a_near_tie_on_are_left_out(tmp_path: Path) -> None:
    other_run = Site(0, "norm", "norm", ((RUN_SEEDS, 5),))
    write(tmp_path / "a", 0, 1, (site("norm", rows=2), [[1], [2]]), (other_run, [[7]]))
    write(tmp_path / "b", 0, 1, (site("norm", rows=2), [[1], [9]]))
    a, b = Recorded(tmp_path / "a", 0), Recorded(tmp_path / "b", 0)
    (found,) = compare(a, b, 1e-4, {0: 6})
    assert found.relative == 0.0 and found.position == 5


@pytest.mark.parametrize(("gap", "tie"), [(1e-6, True), (0.5, False)])
def test_other_experts_are_a_near_tie_only_where_both_choices_are_right(tmp_path: Path, gap: float, tie: bool) -> None:
    logits = [2.0, 1.0, 1.0 - gap]
    made = ((site("mlp.gate.linear"), [logits]),)
    write(tmp_path / "a", 0, 1, *made, (site("mlp.moe_route"), [[0.7, 0.3, 0.0]]))
    write(tmp_path / "b", 0, 1, *made, (site("mlp.moe_route"), [[0.7, 0.0, 0.3]]))
    found = near_ties(Recorded(tmp_path / "a", 0), Recorded(tmp_path / "b", 0), "float32")
    assert found == ({0: 5} if tie else {})


def test_the_first_site_over_the_limit_is_named_whatever_follows() -> None:
    sites = [apart(0, "norm", 1e-7), apart(1, "gdn", 1e-2), apart(2, "norm", 0.9)]
    found = first_divergence(sites, "float32", last_layer=8, worst=1.0)
    assert found.first == sites[1]
    assert [one.layer for one in found.layers] == [0, 1, 2]


def test_below_the_limit_the_largest_step_is_named() -> None:
    sites = [apart(0, "norm", 1e-7), apart(1, "gdn", 1e-4), apart(2, "norm", 2e-4)]
    found = first_divergence(sites, "float32", last_layer=2, worst=1e-3)
    assert found.first == sites[1] and "largest step" in found.how


def test_log_probs_that_no_site_explains_are_of_the_head() -> None:
    found = first_divergence([apart(8, "norm.rms_norm", 1e-7)], "float32", last_layer=8, worst=2.0)
    assert found.first is None and "lm_head" in found.how
