"""Whole kernels, compiled here for both architectures: what a compiler makes of them, and mistakes that must show.

No loop here has a count that differs between lanes and uses its counter in what it leaves: clang 22 (its MachineSink)
reads the counter of the last lane for all of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from evals.gfx.device import resources
from evals.gfx.emulator.memory import EmulatorError
from tests.evals.gfx.emulator.machine import ARCHS, launch, needs_clang, program

pytestmark = [needs_clang, pytest.mark.parametrize("arch", ARCHS)]
BODY = 'extern "C" __global__ void __launch_bounds__(256) k'


@pytest.fixture
def rng() -> np.random.Generator:
    seed = np.random.SeedSequence()
    print(f"seed {seed.entropy}")
    return np.random.default_rng(seed)


def test_integers_of_every_width(tmp_path: Path, arch: str, rng: np.random.Generator) -> None:
    source = (
        BODY
        + """(const int* a, const int* b, long long* out, int n) {
      int i = block() * 64 + thread();
      if (i >= n) return;
      long long x = a[i], y = b[i];
      unsigned long long u = (unsigned)a[i];
      long long r = x * y + (x >> 3) - (long long)(u << 7);
      r ^= y != 0 ? x / y : 0;
      r += (int)(short)a[i] * (signed char)b[i] + (a[i] % 1000003);
      for (int k = 0; k < (i & 7); k++) r = (long long)((unsigned long long)r * 31 + a[i]);
      out[i] = r;
    }"""
    )
    n = 150
    a, b = (rng.integers(-(2**31), 2**31, n).astype(np.int32) for _ in range(2))
    b[::9] = 0
    out = np.zeros(n, np.int64)
    launch(program(tmp_path, arch, source), [a, b, out], n, blocks=3)
    for i in range(n):
        x, y = int(a[i]), int(b[i])
        r = x * y + (x >> 3) - ((x % 2**32) << 7)
        r ^= 0 if y == 0 else int(abs(x) // abs(y)) * (1 if (x < 0) == (y < 0) else -1)
        short, byte = (x + 2**15) % 2**16 - 2**15, (y + 128) % 256 - 128
        r += short * byte + (abs(x) % 1000003) * (1 if x >= 0 else -1)
        for _ in range(i & 7):
            r = r * 31 + x
        assert out[i] == (r + 2**63) % 2**64 - 2**63, i


def test_floats_and_a_sum_over_a_block(tmp_path: Path, arch: str, rng: np.random.Generator) -> None:
    source = (
        '#include "rows.h"\n'
        + BODY
        + """(const float* a, float* out, double* total, int n) {
      int i = block() * 256 + thread();
      float x = i < n ? a[i] : 0.f;
      double sum = sum_block<256>((double)x);
      if (i < n) out[i] = exp_(x) / (1.f + x * x) + rsqrt_rounded(1.f + x * x) - round_even(x);
      if (thread() == 0) total[block()] = sum;
    }"""
    )
    n = 300
    a = (rng.standard_normal(n) * 8).astype(np.float32)
    out, total = np.full(n, np.nan, np.float32), np.full(2, np.nan)
    launch(program(tmp_path, arch, source), [a, out, total], n, blocks=2, threads=256)
    x = a.astype(np.float64)
    np.testing.assert_allclose(out, np.exp(x) / (1 + x * x) + 1 / np.sqrt(1 + x * x) - np.rint(x), rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(total, [x[:256].sum(), x[256:].sum()], rtol=1e-12)


def test_the_rounded_inverse_root_is_rounded_once(tmp_path: Path, arch: str, rng: np.random.Generator) -> None:
    source = BODY + "(const float* a, float* out) { int i = thread(); out[i] = rsqrt_rounded(a[i]); }"
    a = np.exp(rng.uniform(-60, 60, 256)).astype(np.float32)
    out = np.zeros(256, np.float32)
    launch(program(tmp_path, arch, source), [a, out], threads=256)
    expected = (1 / np.sqrt(a.astype(np.longdouble))).astype(np.float32)
    np.testing.assert_array_equal(out, expected)


def test_matrix_products_of_fp8_and_bf16(tmp_path: Path, arch: str, rng: np.random.Generator) -> None:
    source = (
        """typedef float f16v __attribute__((ext_vector_type(16)));
    typedef float f4 __attribute__((ext_vector_type(4)));
    typedef short s4 __attribute__((ext_vector_type(4)));
    """
        + BODY
        + """(const long* a, const long* b, float* c, const s4* d, const s4* e, float* f) {
      int l = thread();
      f16v acc = {};
      int at = (l % 32) * 2 + l / 32, here = (l % 16) * 4 + l / 16;
      acc = __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(a[at], b[at], acc, 0, 0, 0);
      for (int r = 0; r < 16; r++) c[(8 * (r / 4) + 4 * (l / 32) + r % 4) * 32 + l % 32] = acc[r];
      f4 more = {};
      more = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(d[here], e[here], more, 0, 0, 0);
      for (int r = 0; r < 4; r++) f[(4 * (l / 16) + r) * 16 + l % 16] = more[r];
    }"""
    )
    dtype = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    a, b = (torch.from_numpy(rng.standard_normal((32, 16))).to(dtype) for _ in range(2))
    d, e = (torch.from_numpy(rng.standard_normal((16, 16))).bfloat16() for _ in range(2))
    c, f = np.full((32, 32), np.nan, np.float32), np.full((16, 16), np.nan, np.float32)
    bits = [x.contiguous().view(torch.uint8).numpy() for x in (a, b, d, e)]
    kernel = program(tmp_path, arch, source)
    launch(kernel, [bits[0], bits[1], c, bits[2], bits[3], f])
    np.testing.assert_allclose(c, (a.float() @ b.float().T).numpy(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(f, (d.float() @ e.float().T).numpy(), rtol=1e-6, atol=1e-6)
    assert {name.split("_f32_")[1] for name in resources(kernel, 0).matrix} == {"32x32x16_fp8_fp8", "16x16x16_bf16"}


def test_atomics_add_up_over_workgroups(tmp_path: Path, arch: str, rng: np.random.Generator) -> None:
    source = (
        BODY
        + "(const unsigned* a, unsigned* count) { __atomic_fetch_add(&count[a[block() * 64 + thread()] & 3], 1, 0); }"
    )
    a, count = rng.integers(0, 2**32, 320).astype(np.uint32), np.zeros(4, np.uint32)
    launch(program(tmp_path, arch, source), [a, count], blocks=5)
    assert count.tolist() == np.bincount(a & 3, minlength=4).tolist()


def test_a_store_past_the_end_names_kernel_lane_and_buffer(tmp_path: Path, arch: str) -> None:
    source = BODY + "(const float* a, float* out) { out[thread() + 1] = a[thread()]; }"
    a, out = np.zeros(64, np.float32), np.zeros(64, np.float32)
    with pytest.raises(EmulatorError, match="k, workgroup \\(0, 0, 0\\) wave 0 .*global_store.*store outside .*array"):
        launch(program(tmp_path, arch, source), [a, out])


EXCHANGE = """(float* out) {
  __shared__ float held[256];
  held[thread()] = (float)thread();
  %s
  out[thread()] = held[255 - thread()];
}"""


def test_a_missing_barrier_shows(tmp_path: Path, arch: str) -> None:
    out = np.zeros(256, np.float32)
    launch(program(tmp_path, arch, BODY + EXCHANGE % "barrier();"), [out], threads=256)
    assert out.tolist() == list(range(255, -1, -1))
    launch(program(tmp_path, arch, BODY + EXCHANGE % "", "k"), [out], threads=256)
    assert np.isnan(out).any(), "the memory of a workgroup begins as NaN"


def test_a_kernel_that_needs_scratch_is_seen_and_refused(tmp_path: Path, arch: str) -> None:
    source = BODY + "(float* a, int n) { float x[200]; for (int i = 0; i < 200; i++) x[i] = a[i * 64 + thread()];"
    source += " for (int i = 0; i < n; i++) x[(i * 7919) % 200] += x[(i * 31 + n) % 200]; a[thread()] = x[n % 200]; }"
    kernel = program(tmp_path, arch, source)
    assert resources(kernel, 0).scratch >= 800
    with pytest.raises(EmulatorError, match="not implemented: scratch_"):
        launch(kernel, [np.zeros(64 * 200, np.float32)], 3)


def test_a_loop_without_end_ends(tmp_path: Path, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evals.gfx.emulator.machine._MAX_STEPS", 5000)
    source = BODY + "(volatile int* a) { while (a[0] == 0) {} }"
    with pytest.raises(EmulatorError, match="no end after 5001 instructions"):
        launch(program(tmp_path, arch, source), [np.zeros(64, np.int32)])


def test_accesses_are_counted_by_their_width(tmp_path: Path, arch: str) -> None:
    source = BODY + "(const u16* a, u16* b, float* c) { store16(b + thread() * 8, load16(a + thread() * 8));"
    source += " c[thread()] = (float)a[thread() * 3]; }"
    needs = resources(program(tmp_path, arch, source), 0)
    assert needs.loads == {2: 1, 16: 1} and needs.stores == {4: 1, 16: 1}
    assert needs.spills == needs.scratch == needs.lds == 0 and needs.matrix == ()
