"""The physical layout of weights: prepared once by the provider that owns it, refused by every other one."""

from __future__ import annotations

import functools
import inspect

import torch

from rocm_serve.ops.contract import (
    PLAIN,
    LayoutError,
    Op,
    OpFunction,
    Provider,
    WeightTensors,
    layout_tag,
    tag_layout,
)


def prepared(op: Op, provider: Provider, weights: WeightTensors) -> WeightTensors:
    """Return the weights of one layer as the provider reads them, tagged so. A provider of plain ones gets them back.

    Errors: LayoutError for weights that are not plain, and for a provider that returns other names or another number
    of bytes than it was given.
    """
    assert weights.keys() <= set(op.weights), f"{op.name} has the weights {op.weights}, not {sorted(weights)}"
    for name, weight in weights.items():
        if layout_tag(weight) != PLAIN:
            raise LayoutError(
                f"{op.name}: {name} is laid out as {layout_tag(weight)!r} before {provider.name} prepares it;"
                f" legal: {PLAIN!r}"
            )
    if provider.prepare_weights is None:
        return weights
    ready = provider.prepare_weights(weights)
    before, after = ({name: w.nbytes for name, w in some.items()} for some in (weights, ready))
    if before != after:
        raise LayoutError(
            f"{op.name}: {provider.name} was given weights of {before} bytes and returned {after};"
            " legal: the same names and sizes, which the memory plan counts on"
        )
    for weight in ready.values():
        tag_layout(weight, provider.layout)
    return ready


def checked(op: Op, provider: Provider, function: OpFunction) -> OpFunction:
    """Return a function that looks at the tags of its weights before it calls `function`.

    Errors, of that function: LayoutError for a weight with the tag of another layout, or with none where one is due
    (a copy, a view and a cast lose it).
    """
    names = list(inspect.signature(op.reference).parameters)
    places = [(names.index(name), name) for name in op.weights]
    due = provider.layout

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> torch.Tensor:
        for place, name in places:
            weight = args[place] if place < len(args) else kwargs.get(name)
            if isinstance(weight, torch.Tensor) and layout_tag(weight) != due:
                raise LayoutError(_refusal(op, provider, name, layout_tag(weight)))
        return function(*args, **kwargs)

    return call


def _refusal(op: Op, provider: Provider, name: str, tag: str) -> str:
    found = "has no layout tag, so it is plain" if tag == PLAIN else f"is laid out as {tag!r}"
    return f"{op.name} by {provider.name} reads weights laid out as {provider.layout!r}; {name} {found}"
