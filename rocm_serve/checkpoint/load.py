"""Fill one rank's parameters from a checkpoint, or with made-up numbers, and account for every byte."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rocm_serve.checkpoint.fp8 import FP8_MAX
from rocm_serve.checkpoint.initial import draw
from rocm_serve.checkpoint.ledger import check_filled, check_stage, stage_catalogue
from rocm_serve.checkpoint.reader import ITEMSIZES, Bits, CheckpointReader, TensorInfo
from rocm_serve.models.qwen3_5.spec import ModelFacts, scale_key
from rocm_serve.ops.fp8 import FN, FNUZ, FNUZ_SCALE, fn_to_fnuz_
from rocm_serve.parallel.layout import Copy, Param, Part, Place, copies, shape_at
from rocm_serve.parallel.mesh import Coord

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}
_REPORT_SECONDS = 1.0
_DRAW_ELEMENTS = 1 << 22
_OTHERS_EXPERTS = "experts of other ranks"  # of this stage; all else is cut so that every rank holds some of it


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank is. Units: bytes of its own share, seconds."""

    done: int
    total: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second so far."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta(self) -> float | None:
        """Seconds to go at this rate; None before the first byte."""
        return (self.total - self.done) / self.rate if self.rate > 0 else None

    def __str__(self) -> str:
        eta = "?" if self.eta is None else f"{self.eta:.0f} s"
        return f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, {self.rate / 1e9:.2f} GB/s, {eta} to go"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a rank loaded: tensors used, bytes kept of those read, and the tensors left alone, by group."""

    tensors: int
    parameters: int
    bytes_kept: int
    bytes_read: int
    seconds: float
    foreign: Mapping[str, int]
    ignored: Mapping[str, int]

    def lines(self) -> tuple[str, ...]:
        """Say it for the start-up report."""
        kept, read = self.bytes_kept / 1e9, self.bytes_read / 1e9
        head = (
            f"loaded {self.tensors} tensors into {self.parameters} parameters in {self.seconds:.1f} s:"
            f" {kept:.3f} GB kept of {read:.3f} GB read"
        )
        groups = [
            f"{kind}: {count} tensors, {group}"
            for kind, counts in (("foreign", self.foreign), ("ignored", self.ignored))
            for group, count in sorted(counts.items())
        ]
        return (head, *groups)


def load_stage(
    reader: CheckpointReader,
    facts: ModelFacts,
    coord: Coord,
    params: Mapping[str, Param],
    into: Mapping[str, Tensor],
    progress: Callable[[Progress], None] | None = None,
) -> LoadReport:
    """Fill `into` (runtime name -> tensor of this rank's shape) from the checkpoint.

    The books are checked from headers first, so every user error comes before the first big read. `progress` is
    called about once a second and at the end. FP8 weights come out in the dialect of their tensors in `into`, e4m3fn
    as in the file or e4m3fnuz, their scales with them.
    Errors: UserError, one line.
    """
    place = coord.place
    mtp = any(name.startswith("mtp.") for name in params)
    found = stage_catalogue(reader, facts, coord, mtp=mtp)
    infos = check_stage(reader, facts, params, found)
    check_filled(params, place)
    _check_destination(params, into, place)
    doubled = _doubled(params, into)
    work = [
        (infos[copy.key], copy, into[name], name in doubled)
        for name, param in params.items()
        for copy in copies(param, place)
    ]
    work.sort(key=lambda item: (item[0].file, item[0].offset))
    total = sum(copy.elements * ITEMSIZES[info.dtype] for info, copy, *_ in work)
    kept, read = reader.bytes_kept, reader.bytes_read
    start = last = time.monotonic()
    for info, copy, target, double in work:
        _copy(reader, info, copy, target, double)
        now = time.monotonic()
        if progress is not None and now - last >= _REPORT_SECONDS:
            progress(Progress(reader.bytes_kept - kept, total, now - start))
            last = now
    seconds = time.monotonic() - start
    assert reader.bytes_kept - kept == total
    if progress is not None:
        progress(Progress(total, total, seconds))
    used = len({copy.key for _, copy, *_ in work})
    foreign = dict(found.foreign) | ({_OTHERS_EXPERTS: len(infos) - used} if used < len(infos) else {})
    return LoadReport(used, len(params), total, reader.bytes_read - read, seconds, foreign, found.ignored)


def dummy_fill(params: Mapping[str, Param], coord: Coord, into: Mapping[str, Tensor], *, seed: int = 0) -> None:
    """Fill `into` with numbers that depend on the checkpoint key and the element's place in that tensor only.

    So the shares of different ranks, and of different topologies, expert placements and FP8 dialects, are slices of
    one virtual checkpoint.
    """
    place = coord.place
    check_filled(params, place)
    _check_destination(params, into, place)
    doubled = _doubled(params, into)
    for name, param in params.items():
        parts = {part.key: part for part in param.parts}
        for copy in copies(param, place):
            share = _share(into[name], copy)
            _draw_into(share, param, parts[copy.key], copy, seed)
            if name in doubled:
                share.mul_(FNUZ_SCALE)


def as_tensor(bits: Bits, dtype: str) -> Tensor:
    """Reinterpret what the reader returned as the dtype that the header names."""
    return torch.from_numpy(bits).view(_DTYPES[dtype])


def _doubled(params: Mapping[str, Param], into: Mapping[str, Tensor]) -> frozenset[str]:
    """Name the scales whose weights are stored in e4m3fnuz."""
    return frozenset(scale_key(name) for name in params if into[name].dtype is FNUZ)


def _copy(reader: CheckpointReader, info: TensorInfo, copy: Copy, target: Tensor, double: bool) -> None:
    share = _share(target, copy)
    for block in reader.read(info, copy.src):
        value = as_tensor(block.bits, info.dtype)
        piece = share[block.at]
        if target.dtype in (FN, FNUZ):
            _copy_codes(value, piece)
        else:
            piece.copy_(value)
            if double:
                piece.mul_(FNUZ_SCALE)


def _copy_codes(value: Tensor, piece: Tensor) -> None:
    """Copy e4m3fn codes into a piece of a parameter, in that one's dialect."""
    codes = piece.view(torch.uint8)
    codes.copy_(value.view(torch.uint8))
    if piece.dtype is FNUZ:
        fn_to_fnuz_(codes)


def _share(target: Tensor, copy: Copy) -> Tensor:
    """View the place that `copy` fills, with the source's dimensions."""
    share = target[copy.dst]
    return share if share.dim() == len(copy.src) else share.squeeze(0)


def _check_destination(params: Mapping[str, Param], into: Mapping[str, Tensor], place: Place) -> None:
    assert params.keys() == into.keys(), f"parameters without a tensor or the reverse: {params.keys() ^ into.keys()}"
    for name, param in params.items():
        shape, dtype = shape_at(param, place), into[name].dtype
        assert into[name].shape == shape, f"{name}: tensor of shape {tuple(into[name].shape)}, share of {shape}"
        legal = {"fp8": (FN, FNUZ), "float32": (torch.float32,)}.get(param.dtype, (dtype,))
        assert dtype in legal, f"{name}: tensor of {dtype}, parameter of {legal}"


def _draw_into(share: Tensor, param: Param, part: Part, copy: Copy, seed: int) -> None:
    low, high = _bounds(param, part)
    digest = hashlib.sha256(f"{seed}/{part.key}".encode()).digest()
    key = int.from_bytes(digest[:8], "little", signed=True)
    strides = [prod(part.source[d + 1 :]) for d in range(len(part.source))]
    inner = prod(s.stop - s.start for s in copy.src[1:])
    step = max(1, _DRAW_ELEMENTS // inner)
    for first in range(copy.src[0].start, copy.src[0].stop, step):
        spans = (slice(first, min(first + step, copy.src[0].stop)), *copy.src[1:])
        index = torch.zeros((), dtype=torch.int64, device=share.device)
        for span, stride in zip(spans, strides, strict=True):
            steps = torch.arange(span.start, span.stop, device=share.device) * stride
            index = index.unsqueeze(-1) + steps
        value = _uniform(index, key) * (high - low) + low
        rows = slice(first - copy.src[0].start, spans[0].stop - copy.src[0].start)
        if param.dtype == "fp8":
            _copy_codes(value.to(FN), share[rows])
        else:
            share[rows].copy_(value.to(share.dtype))


def _bounds(param: Param, part: Part) -> tuple[float, float]:
    """Return the ends of the uniform distribution of a part's elements."""
    if param.dtype == "fp8":
        return -FP8_MAX, FP8_MAX
    if part.key.endswith("_scale_inv"):
        width = part.source[-1] * 128
        unit = draw(part.key.removesuffix("_scale_inv"), (*part.source[:-1], width)).high / FP8_MAX
        return 0.75 * unit, 1.25 * unit
    how = draw(part.key, part.source)
    return how.low, how.high


def _uniform(index: Tensor, key: int) -> Tensor:
    """Return float32 numbers in [0, 1) by hashing (splitmix64) the element's index and the tensor's key."""
    z = index * -7046029254386353131 + key
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        z = (z ^ _shifted(z, shift)) * factor
    return _shifted(z ^ _shifted(z, 31), 40).float() * 2.0**-24


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
