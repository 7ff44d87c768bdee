"""Reading AITER's tables: a shape of a card, over all files that hold tuned rows, and nothing of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_serve.platform.aiter_tables import BF16_PRODUCTS, FP8_PRODUCTS, tuned_experts, tuned_products

HEADS = {
    "gemm": "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us",
    "old gemm": "cu_num,M,N,K,libtype,kernelId,splitK,us",
    "moe": "gfx,cu_num,token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1",
}
MOE = "ActivationType.Silu,torch.bfloat16,torch.float8_e4m3fn,torch.float8_e4m3fn"


@pytest.fixture
def aiter(tmp_path: Path) -> Path:
    """An installed package's folder with its configs."""
    files = {
        f"{FP8_PRODUCTS}.csv": (
            "old gemm",
            ["304,1,4096,2048,ck,1,0,9", "80,2,4096,2048,ck,1,0,9", "304,64,1,1,ck,1,0,9"],
        ),
        f"model_configs/{FP8_PRODUCTS}_some.csv": (
            "gemm",
            [
                "gfx942,304,512,4096,2048,ck,1,0,9",
                "gfx942,304,1,4096,2048,asm,1,0,9",
                "gfx950,304,7,4096,2048,ck,1,0,9",
            ],
        ),
        f"model_configs/{FP8_PRODUCTS.replace('tuned', 'untuned')}_some.csv": ("gemm", ["gfx942,304,9,4096,2048,,,,"]),
        "a8w8_blockscale_tuned_gemm.csv": ("gemm", ["gfx942,304,77,4096,2048,ck,1,0,9"]),
        f"{BF16_PRODUCTS}.csv": ("gemm", ["gfx950,256,16,8192,2048,asm,1,0,9"]),
        "tuned_fmoe.csv": ("moe", [f"gfx950,256,1,4096,256,513,11,{MOE},QuantType.per_1x128,1"]),
        "untuned_fmoe.csv": ("moe", [f"gfx950,256,5,4096,256,513,11,{MOE},QuantType.per_1x128,1"]),
        "model_configs/a8w8_blockscale_tuned_fmoe_x.csv": (
            "moe",
            [
                f"gfx950,256,32,4096,256,513,11,{MOE},QuantType.per_1x128,1",
                f"gfx950,256,64,4096,256,513,11,{MOE},QuantType.per_1x32,1",
                f"gfx942,256,96,4096,256,513,11,{MOE},QuantType.per_1x128,1",
            ],
        ),
    }
    for name, (head, rows) in files.items():
        path = tmp_path / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([HEADS[head], *rows]) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arch", "units", "shape", "rows"),
    [
        ("gfx942", 304, (4096, 2048), (1, 512)),
        ("gfx942", 80, (4096, 2048), (2,)),
        ("gfx950", 304, (4096, 2048), (7,)),
        ("gfx950", 256, (4096, 2048), ()),
        ("gfx942", 304, (2048, 4096), ()),
        ("gfx942", 304, (1, 1), (64,)),
    ],
)
def test_a_product_has_the_rows_of_its_shape_and_card(
    aiter: Path, arch: str, units: int, shape: tuple[int, int], rows: tuple[int, ...]
) -> None:
    assert tuned_products(aiter, FP8_PRODUCTS, arch, units, *shape) == rows


def test_kinds_of_products_do_not_mix(aiter: Path) -> None:
    assert tuned_products(aiter, BF16_PRODUCTS, "gfx950", 256, 8192, 2048) == (16,)
    assert tuned_products(aiter, BF16_PRODUCTS, "gfx942", 304, 4096, 2048) == ()


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ({}, (1, 32)),
        ({"experts": 512, "top_k": 10}, ()),
        ({"width": 128}, ()),
        ({"fp8": False}, ()),
    ],
)
def test_experts_have_the_rows_of_their_numbers_and_quantisation(
    aiter: Path, change: dict[str, int], rows: tuple[int, ...]
) -> None:
    shape = {"hidden": 4096, "width": 256, "experts": 513, "top_k": 11, "fp8": True} | change
    assert tuned_experts(aiter, "gfx950", 256, **shape) == rows  # type: ignore[arg-type]


def test_a_package_without_tables_has_no_tuned_row(tmp_path: Path) -> None:
    assert tuned_products(tmp_path / "empty", FP8_PRODUCTS, "gfx942", 304, 4096, 2048) == ()


def test_a_row_with_too_many_fields_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    text = f"{HEADS['gemm']}\ngfx942,304,1,4096,2048,ck,1,0,9,more\ngfx942,304,3,4096,2048,ck,1,0,9\n"
    (tmp_path / "configs" / f"{FP8_PRODUCTS}.csv").write_text(text)
    assert tuned_products(tmp_path, FP8_PRODUCTS, "gfx942", 304, 4096, 2048) == (3,)
