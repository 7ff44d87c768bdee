"""--all-reduce: what auto means, what is refused, and the switch of others that means the library."""

from __future__ import annotations

import msgspec
import pytest

from rocm_serve.config.all_reduce import decide
from rocm_serve.config.schema import ServeConfig
from rocm_serve.config.spelling import in_our_words
from rocm_serve.errors import UserError

KNOWN = {"--all-reduce": True}


def config(**wishes: object) -> ServeConfig:
    return msgspec.convert({"model": "some/dir"} | wishes, ServeConfig)


def test_auto_is_the_library_and_on_amd_gpus_says_why() -> None:
    reasons: dict[str, str] = {}
    assert decide(config(tp=8), "rocm", "gfx942", 1, reasons) == "library"
    assert "never run on a GPU" in reasons.pop("all_reduce")
    assert decide(config(), "rocm", "gfx942", 1, reasons) == decide(config(tp=2), "cpu", "cpu", 1, reasons) == "library"
    assert decide(config(tp=8, all_reduce="library"), "rocm", "gfx942", 1, reasons) == "library"
    assert reasons == {"all_reduce": "--all-reduce"}


@pytest.mark.parametrize(("tp", "pp", "nnodes"), [(2, 1, 1), (4, 1, 1), (6, 1, 1), (8, 2, 2), (4, 4, 2)])
def test_aiter_is_taken_where_it_has_kernels(tp: int, pp: int, nnodes: int) -> None:
    assert decide(config(tp=tp, pp=pp, nnodes=nnodes, all_reduce="aiter"), "rocm", "gfx950", nnodes, {}) == "aiter"


@pytest.mark.parametrize(
    ("arch", "tp", "nnodes", "why"),
    [
        ("sm_90", 8, 1, "AITER sums on gfx942 and gfx950, this is sm_90"),
        ("cpu", 2, 1, "AITER sums on gfx942 and gfx950, this is cpu"),
        ("gfx942", 1, 1, "AITER sums over 2, 4, 6, 8 ranks, --tp is 1"),
        ("gfx942", 16, 2, "AITER sums over 2, 4, 6, 8 ranks, --tp is 16"),
        ("gfx942", 8, 2, "AITER sums over GPUs of one host, and --tp 8 spans several with 4 ranks a host"),
    ],
)
def test_aiter_is_refused_elsewhere_with_what_is_legal(arch: str, tp: int, nnodes: int, why: str) -> None:
    device = "rocm" if arch.startswith("gfx") else "cuda" if arch.startswith("sm_") else "cpu"
    with pytest.raises(UserError) as refused:
        decide(config(tp=tp, nnodes=nnodes, all_reduce="aiter"), device, arch, nnodes, {})  # type: ignore[arg-type]
    assert str(refused.value) == f"--all-reduce aiter: {why}; legal: auto, library"


def test_the_switch_of_others_is_the_library_and_no_second_word() -> None:
    line = in_our_words(["--disable-custom-all-reduce"], KNOWN)
    assert line.words == ["--all-reduce", "library"] and not line.notes
    assert in_our_words(["--all-reduce=library", "--disable-custom-all-reduce"], KNOWN).words
    with pytest.raises(UserError, match="are one setting, --all-reduce; give it once"):
        in_our_words(["--all-reduce", "aiter", "--disable-custom-all-reduce"], KNOWN)
    with pytest.raises(UserError, match="--disable-custom-all-reduce takes no value"):
        in_our_words(["--disable-custom-all-reduce=1"], KNOWN)
