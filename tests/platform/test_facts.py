"""Which FP8 encoding belongs to which device."""

from __future__ import annotations

import pytest

from rocm_serve.platform.facts import DeviceKind, Fp8Dialect, Platform, fp8_dialect


@pytest.mark.parametrize(
    ("device", "arch", "dialect"),
    [
        ("rocm", "gfx942", "fnuz"),
        ("rocm", "gfx950", "fn"),
        ("rocm", "gfx90a", "none"),
        ("cuda", "sm_80", "none"),
        ("cuda", "sm_89", "fn"),
        ("cuda", "sm_90", "fn"),
        ("cuda", "sm_100", "fn"),
        ("cpu", "x86_64", "fn"),
    ],
)
def test_dialect_follows_the_matrix_instructions(device: DeviceKind, arch: str, dialect: Fp8Dialect) -> None:
    assert fp8_dialect(device, arch) == dialect


def test_description_names_what_a_bug_report_needs() -> None:
    gpu = Platform(
        device="rocm",
        arch="gfx942",
        num_gpus=8,
        compute_units=304,
        hbm_bytes=206_000_000_000,
        gpu_name="AMD Instinct MI300X",
        cores=96,
        free_ram_bytes=1_500_000_000_000,
    )
    line = gpu.describe()
    for fact in ("8 x AMD Instinct MI300X", "gfx942", "304 CUs", "206 GB", "fnuz", "96 cores", "1500.0 GB RAM"):
        assert fact in line
