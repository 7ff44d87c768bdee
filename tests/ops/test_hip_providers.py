"""The provider `hip` of the norms without a GPU: what it refuses, what it hands to the library, where it is bound.

What its kernels compute is judged in tests/evals/gfx (emulated) and test_hip_gpu.py.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels_hip import build
from rocm_serve.errors import UserError
from rocm_serve.ops import hip_library
from rocm_serve.ops.bind import OPS, bind_ops, binding_lines
from rocm_serve.ops.rms_norm import hip as hip_rms_norm
from rocm_serve.platform.facts import GpuFacts

NORMS = {"rms_norm": "rms_norm", "add_rms_norm": "rms_norm", "gated_rms_norm": "", "qk_norm_rope": ""}
BF16 = torch.bfloat16


class Recorder:
    """A library that keeps its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def entry(self, name: str) -> Any:
        letters = hip_library.ENTRY_POINTS[name]
        packed = hip_library.packer(name)

        def launch(*arguments: Any) -> None:
            assert len(arguments) + 1 == len(letters), "the stream is the library's"
            assert len(packed(arguments, 0)) == struct.calcsize(letters)
            for argument, letter in zip(arguments, letters, strict=False):
                if isinstance(argument, torch.Tensor) or argument is None:
                    assert letter == "P"
                else:
                    assert letter == ("f" if isinstance(argument, float) else "i" if type(argument) is bool else letter)
                    assert letter in "qif"
            self.calls.append((name, arguments))

        return launch


def function(op: str, library: Recorder) -> Any:
    return getattr(import_module(f"rocm_serve.ops.{NORMS[op] or op}.hip"), f"make_{op}")(library)


@pytest.fixture
def on_sm_90(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A machine with an H200 and a library that is already there."""
    library = Recorder()
    monkeypatch.setattr(hip_library, "gpus_seen_by_torch", lambda: GpuFacts(kind="cuda", arch="sm_90", num_gpus=1))
    monkeypatch.setattr(build, "missing", lambda target: None)
    monkeypatch.setattr(hip_library, "loaded_library", lambda: library)
    return library


@pytest.mark.parametrize("op", NORMS)
def test_the_function_has_the_signature_of_the_reference(op: str) -> None:
    assert function(op, Recorder()).__annotations__.keys() == OPS[op].reference.__annotations__.keys()


def test_every_norm_is_bound_to_hip_and_the_report_says_so(on_sm_90: Recorder) -> None:
    facts = {"dtype": "bfloat16", "hidden_size": 8192, "value_dim": 128, "head_dim": 256, "rotary_dim": 64}
    report = bind_ops(dict.fromkeys(NORMS, "hip"), "sm_90", facts=facts).report
    lines = list(binding_lines(report))
    for op in NORMS:
        assert any(line.startswith(f"op {op}: hip") for line in lines)


def test_on_rocm_hip_is_tried_first_and_on_cuda_only_when_asked_for(on_sm_90: Recorder) -> None:
    rocm = {line.op: line.provider for line in bind_ops({}, "gfx942", facts={"dtype": "bfloat16"}).report}
    assert {rocm[op] for op in NORMS} == {"hip"}
    cuda = {line.op: line.provider for line in bind_ops({}, "sm_90", facts={"dtype": "bfloat16"}).report}
    assert "hip" not in cuda.values()


@pytest.mark.parametrize(
    ("op", "facts", "words"),
    [
        ("rms_norm", {"dtype": "float32"}, "takes bfloat16 rows, not float32"),
        ("rms_norm", {"hidden_size": 8196}, "takes a hidden_size that is a multiple of 8 up to 16384, not 8196"),
        ("add_rms_norm", {"hidden_size": 16392}, "up to 16384, not 16392"),
        ("gated_rms_norm", {"value_dim": 1024}, "takes a value_dim that is a multiple of 8 up to 512, not 1024"),
        ("qk_norm_rope", {"head_dim": 512}, "takes a head_dim that is a multiple of 8 up to 256, not 512"),
        ("qk_norm_rope", {"rotary_dim": 24}, "takes a rotary_dim that is a multiple of 16 up to 256, not 24"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_when_it_is_bound(
    on_sm_90: Recorder, op: str, facts: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        bind_ops({op: "hip"}, "sm_90", facts=facts)


def test_on_a_cpu_it_is_refused_with_words_and_nothing_of_it_is_loaded() -> None:
    with pytest.raises(UserError, match="--op rms_norm=hip: hip runs on gfx942, gfx950, sm_\\*, not on cpu"):
        bind_ops({"rms_norm": "hip"}, "cpu")
    script = (
        "import rocm_serve.ops.bind as b, sys; b.bind_ops({}, 'cpu'); print([m for m in sys.modules if 'hip' in m])"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "['rocm_serve.ops.hip_provider']"


def test_without_a_gpu_or_a_compiler_the_next_provider_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip_library, "gpus_seen_by_torch", lambda: GpuFacts(kind="none"))
    assert hip_library.why_missing() == "needs a GPU, and torch sees none here"
    monkeypatch.setattr(hip_library, "gpus_seen_by_torch", lambda: GpuFacts(kind="rocm", arch="gfx950"))
    monkeypatch.setattr(build, "missing", lambda target: "is not built")
    refused = {line.op: dict(line.refused) for line in bind_ops({}, "gfx950").report}
    assert refused["rms_norm"]["hip"] == "is not built"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_TH": torch.zeros(3, 64)}, "takes bfloat16 rows, not torch.float32"),
        ({"x_TH": torch.zeros(3, 20, dtype=BF16)}, "multiple of 8 up to 16384, not 20"),
        ({"x_TH": torch.zeros(3, 16392, dtype=BF16)}, "not 16392"),
        ({"weight_H": torch.zeros(64)}, "a weight of torch.bfloat16 \\(64,\\) is wanted"),
        ({"weight_H": torch.zeros(72, dtype=BF16)}, "is wanted, not torch.bfloat16"),
    ],
)
def test_a_call_that_no_kernel_takes_is_refused(change: dict[str, torch.Tensor], words: str) -> None:
    made = {"x_TH": torch.zeros(3, 64, dtype=BF16), "weight_H": torch.zeros(64, dtype=BF16), "eps": 1e-6}
    library = Recorder()
    with pytest.raises(ValueError, match=words):
        function("rms_norm", library)(**{**made, **change}, plus_one=True)
    assert library.calls == []


def test_gates_and_rotations_that_no_kernel_takes_are_refused() -> None:
    gated, turned = function("gated_rms_norm", Recorder()), function("qk_norm_rope", Recorder())
    x, weight = torch.zeros(2, 3, 64, dtype=BF16), torch.zeros(64, dtype=BF16)
    with pytest.raises(ValueError, match="knows the activations silu and sigmoid, not 'gelu'"):
        gated(x, x, weight, eps=1e-6, activation="gelu")
    with pytest.raises(ValueError, match="a weight of bfloat16 or float32, not torch.float16"):
        gated(x, x, weight.half(), eps=1e-6, activation="silu")
    angles = torch.zeros(9, 4)
    with pytest.raises(ValueError, match="rotated dimensions in multiples of 16, not 8"):
        turned(x, x, weight, weight, angles, angles, torch.zeros(2), eps=1e-6)


def test_strides_are_handed_on_and_only_unaligned_rows_are_copied() -> None:
    library = Recorder()
    norm, weight = function("rms_norm", library), torch.zeros(64, dtype=BF16)
    wide = torch.zeros(6, 4, 128, dtype=BF16)
    heads = wide[:, :, :64]
    norm(heads, weight, eps=1e-6, plus_one=True)
    name, (x, _, _, *sizes, eps, plus_one) = library.calls[-1]
    assert name == "rs_rms_norm" and x is heads
    assert sizes == [24, 4, 512, 128, 64] and (eps, plus_one) == (1e-6, True)
    for odd in (wide[:, 0, 3:67], torch.zeros(6, 68, dtype=BF16)[:, :64], wide[:, 0, ::2]):
        norm(odd, weight, eps=1e-6, plus_one=True)
        copy = library.calls[-1][1][0]
        assert copy is not odd and copy.is_contiguous() and torch.equal(copy, odd)


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "gated_rms_norm"])
def test_a_call_makes_its_result_and_nothing_else(op: str) -> None:
    """Whatever else a call allocates costs the host as much as the launch."""
    made: list[str] = []
    library = Recorder()
    run, rows = function(op, library), torch.zeros(5, 3, 128, dtype=BF16)[:, 1]
    weight, how = torch.zeros(128, dtype=BF16), {"eps": 1e-6}
    arguments = {
        "rms_norm": (rows, weight),
        "add_rms_norm": (rows, torch.zeros(5, 128, dtype=BF16), weight),
        "gated_rms_norm": (rows[:, None], torch.zeros(5, 2, 128, dtype=BF16)[:, 1:], weight),
    }[op]
    more = how | ({"activation": "silu"} if op == "gated_rms_norm" else {"plus_one": True})

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made.append(str(call))
            return call(*args, **(kwargs or {}))

    with Made():
        y = run(*arguments, **more)
    assert made == ["aten.empty_like.default"]
    assert y.is_contiguous() and y.data_ptr() in {
        x.data_ptr() for x in library.calls[0][1] if isinstance(x, torch.Tensor)
    }


def test_a_residual_stream_that_is_not_aligned_still_receives_the_sum() -> None:
    class Adder(Recorder):
        def entry(self, name: str) -> Any:
            recorded = super().entry(name)

            def launch(*arguments: Any) -> None:
                recorded(*arguments)
                arguments[1].add_(arguments[0])

            return launch

    stream = torch.ones(4, 65, dtype=BF16)[:, 1:]
    weight = torch.zeros(64, dtype=BF16)
    function("add_rms_norm", Adder())(torch.ones(4, 64, dtype=BF16), stream, weight, eps=1e-6, plus_one=True)
    assert bool((stream == 2).all())


@pytest.fixture
def real_library(monkeypatch: pytest.MonkeyPatch) -> tuple[hip_library.LoadedLibrary, list[Any], list[int]]:
    """A LoadedLibrary whose C side keeps the bytes it was given and returns the last code; the stream is 77."""
    received: list[Any] = []
    codes = [0]

    def entry_point(packed: bytes) -> int:
        received.append(packed)
        return codes[-1]

    class Loaded:
        rs_rms_norm = staticmethod(entry_point)

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    monkeypatch.setattr(hip_library.ctypes, "CDLL", lambda path: Loaded)
    return hip_library.LoadedLibrary(Path("kernels.so")), received, codes


def test_the_struct_holds_addresses_numbers_and_the_current_stream(real_library: Any) -> None:
    library, received, _ = real_library
    x, weight = torch.zeros(3, 64, dtype=BF16), torch.zeros(64, dtype=BF16)
    y = hip_rms_norm.make_rms_norm(library)(x, weight, eps=0.5, plus_one=True)
    expected = (x.data_ptr(), weight.data_ptr(), y.data_ptr(), 3, 1, 64, 0, 64, 0.5, 1, 77)
    assert struct.unpack("@PPPqqqqqfiP", received[0]) == expected


def test_a_code_of_the_runtime_is_an_error(real_library: Any) -> None:
    library, _, codes = real_library
    codes.append(98)
    with pytest.raises(RuntimeError, match="rs_rms_norm: the GPU runtime refused the launch with code 98"):
        library.entry("rs_rms_norm")(torch.zeros(1), None, None, 0, 1, 0, 0, 8, 1e-6, False)
