"""The picture shows every layer where its numbers are."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from rocm_serve.diagnostics.experts.counts import Counts, LayerCount
from rocm_serve.diagnostics.experts.planner import plan_layer
from rocm_serve.diagnostics.experts.plot import svg
from rocm_serve.diagnostics.experts.show import Planned
from tests.diagnostics.experts.made import SHAPE

SPACE = "{http://www.w3.org/2000/svg}"


def planned(chosen: dict[int, tuple[int, ...]], ep: int, redundant: int) -> Planned:
    layers = {layer: LayerCount(tokens=sum(one) // 4, chosen=one) for layer, one in chosen.items()}
    counts = Counts(SHAPE, 2, 1, layers, (Path("made"),))
    return Planned(counts, ep, redundant, {layer: plan_layer(one, ep, redundant) for layer, one in chosen.items()})


def heights(drawn: str, kind: str) -> list[float]:
    """Of the marks of one kind, layer by layer; SVG's y grows downwards."""
    groups = ElementTree.fromstring(drawn).findall(f"{SPACE}g")
    return [float(mark.attrib["cy"]) for g in groups for mark in g.findall(f"{SPACE}circle") if kind in mark.attrib]


def test_worse_is_higher_and_the_draft_layer_comes_last() -> None:
    skewed = (90, *(1,) * 15)
    drawn = svg(planned({-1: (2,) * 16, 0: skewed, 1: (2,) * 16}, 2, 2))
    titles = [one.text or "" for one in ElementTree.fromstring(drawn).iter(f"{SPACE}title")]
    assert [title.partition(":")[0] for title in titles] == ["layer 0", "layer 1", "layer draft"]
    in_order, as_planned = heights(drawn, "stroke"), heights(drawn, "r")[1::2]
    assert in_order[0] < as_planned[0], "above what it becomes"
    assert in_order[1] == as_planned[1] == in_order[2], "even layers stay where they are, at 1"
    assert as_planned[0] <= in_order[1]


@pytest.mark.parametrize(("ep", "redundant"), [(1, 0), (3, 2)])
def test_layers_that_nothing_can_be_said_of_are_drawn_too(ep: int, redundant: int) -> None:
    """All even; and no equal shares in order."""
    drawn = svg(planned({0: (2,) * 16, 1: (0,) * 16}, ep, redundant))
    assert len(heights(drawn, "r")) == (4 if ep == 1 else 2)
