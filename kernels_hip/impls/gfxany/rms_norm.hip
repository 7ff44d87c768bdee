// RMS norm of bf16 rows: plain, with the residual add in one pass, and quantised per 128 columns.
// Formula: x / sqrt(mean(x^2) + eps) * (1 + w), or * w. Reference: rocm_serve/ops/rms_norm/reference.py.
#include "rows.h"

using namespace rs;

namespace {

constexpr int kRowsThreads = 256;  // of a block in which every group of lanes has a row

// What a row of the output becomes.
struct Bf16Out {
  u16* y;
  __device__ __forceinline__ void put(u32 row, int chunk, int chunks, const float (&x)[8], bool live) const {
    if (live) store16(y + ((i64)row * chunks + chunk) * 8, pack(x));
  }
};

// Rounded to bf16 first, then one scale for 128 columns: what quantising the rounded norm gives. 16 lanes hold a block.
struct Fp8Out {
  unsigned char* values;
  float* scales;
  u16* y;  // the rounded norm too, or null
  __device__ __forceinline__ void put(u32 row, int chunk, int chunks, const float (&x)[8], bool live) const {
    const Vec16 raw = pack(x);
    float rounded[8];
    unpack(raw, rounded);
    float largest = 0.f;
#pragma unroll
    for (int j = 0; j < 8; j++) largest = max_(largest, live ? abs_(rounded[j]) : 0.f);
#pragma unroll
    for (int step = 8; step; step >>= 1) largest = max_(largest, from_lane(largest, lane() ^ step));
    if (!live) return;
    const float scale = max_(largest, 1e-10f) / kFp8Max;
#pragma unroll
    for (int j = 0; j < 8; j++) rounded[j] = max_(min_(rounded[j] / scale, kFp8Max), -kFp8Max);
    const i64 at = (i64)row * chunks + chunk;
    store8(values + at * 8, {{pack_fp8(rounded[0], rounded[1], rounded[2], rounded[3]),
                              pack_fp8(rounded[4], rounded[5], rounded[6], rounded[7])}});
    if (chunk % 16 == 0) scales[(i64)row * ((chunks + 15) / 16) + chunk / 16] = scale;
    if (y != nullptr) store16(y + at * 8, raw);
  }
};

struct Norm {
  const u16* x;
  const u16* weight;
  u16* residual;  // null: no add
  Rows x_rows, residual_rows;
  u32 rows;
  int chunks;
  double inverse_width;
  float eps;
  int plus_one;
};

// LANES threads of a wave for a row (LANES 0: the block), each with up to CHUNKS chunks, LANES apart.
template <int THREADS, int LANES, int CHUNKS, bool ADD, class Out>
__device__ __forceinline__ void norm_rows(const Norm& n, const Out& out) {
  constexpr int kLanes = LANES ? LANES : THREADS;
  const int first = (int)(thread() % kLanes);
  const u32 asked = block() * (THREADS / kLanes) + thread() / kLanes;
  const bool exists = asked < n.rows;
  const u32 row = exists ? asked : n.rows - 1;  // lanes without a row take part in the sums of others
  const u16* x = n.x + n.x_rows.start(row);
  Vec16 held[CHUNKS], weight[CHUNKS];
  double sum = 0;
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int chunk = first + i * kLanes;
    if (chunk < n.chunks) {
      held[i] = load16_once(x + chunk * 8);
      weight[i] = load16(n.weight + chunk * 8);
      if constexpr (ADD) {
        u16* stream = n.residual + n.residual_rows.start(row) + chunk * 8;
        held[i] = add(held[i], load16(stream));
        if (exists) store16(stream, held[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < CHUNKS; i++)
    if (first + i * kLanes < n.chunks) sum += squares(held[i]);
  sum = LANES ? sum_lanes<kLanes>(sum) : sum_block<THREADS>(sum);
  const float factor = inverse_rms(sum, n.inverse_width, n.eps);
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int chunk = first + i * kLanes;
    const bool live = exists && chunk < n.chunks;
    float value[8] = {}, scale[8];
    if (live) {
      unpack(held[i], value);
      scale_of(weight[i], n.plus_one, scale);
#pragma unroll
      for (int j = 0; j < 8; j++) value[j] = value[j] * factor * scale[j];
    }
    out.put(row, chunk, n.chunks, value, live);
  }
}

}  // namespace

// A kernel's name says how many columns it takes: 128, 512, 8192, 16384.
#define NORM_KERNELS(NAME, ADD, OUT)                                                                    \
  extern "C" __global__ void __launch_bounds__(256) NAME##_512(Norm n, OUT out) {                       \
    norm_rows<256, 32, 2, ADD>(n, out);                                                                 \
  }                                                                                                     \
  extern "C" __global__ void __launch_bounds__(256) NAME##_8192(Norm n, OUT out) {                      \
    norm_rows<256, 0, 4, ADD>(n, out);                                                                  \
  }                                                                                                     \
  extern "C" __global__ void __launch_bounds__(512) NAME##_16384(Norm n, OUT out) {                     \
    norm_rows<512, 0, 4, ADD>(n, out);                                                                  \
  }
NORM_KERNELS(rms_norm, false, Bf16Out)
NORM_KERNELS(add_rms_norm, true, Bf16Out)
NORM_KERNELS(rms_norm_fp8, false, Fp8Out)
extern "C" __global__ void __launch_bounds__(256) rms_norm_128(Norm n, Bf16Out out) {
  norm_rows<256, 16, 1, false>(n, out);
}

#define LAUNCH(NAME, THREADS, PER_BLOCK, OUT) \
  NAME<<<(n.rows + (PER_BLOCK) - 1) / (PER_BLOCK), THREADS, 0, (gpu_stream)stream>>>(n, OUT)
#define LAUNCH_BY_WIDTH(NAME, OUT)                        \
  if (width <= 512)                                       \
    LAUNCH(NAME##_512, kRowsThreads, 8, OUT);             \
  else if (width <= 8192)                                 \
    LAUNCH(NAME##_8192, 256, 1, OUT);                     \
  else                                                    \
    LAUNCH(NAME##_16384, 512, 1, OUT);

static Norm make_norm(const void* x, const void* weight, void* residual, i64 rows, i64 inner, i64 outer_stride,
                      i64 inner_stride, i64 residual_stride, i64 width, float eps, int plus_one) {
  return {(const u16*)x, (const u16*)weight, (u16*)residual, {outer_stride, inner_stride, (u32)inner},
          {residual_stride, 0, 1}, (u32)rows, (int)(width / 8), 1.0 / (double)width, eps, plus_one};
}

// Entry points. Pointers are 16-byte aligned, strides (in elements) and width multiples of 8, width at most 16384, rows
// fewer than 2^31; the caller has checked. Row r of x is at (r / inner) * outer_stride + (r % inner) * inner_stride.
// They return the runtime's error code, 0 when the launch was accepted.

extern "C" int rs_rms_norm(const void* x, const void* weight, void* y, i64 rows, i64 inner, i64 outer_stride,
                           i64 inner_stride, i64 width, float eps, int plus_one, void* stream) {
  if (rows == 0) return 0;
  const Norm n =
      make_norm(x, weight, nullptr, rows, inner, outer_stride, inner_stride, 0, width, eps, plus_one);
  const Bf16Out out = {(u16*)y};
  if (width <= 128)
    LAUNCH(rms_norm_128, kRowsThreads, 16, out);
  else
    LAUNCH_BY_WIDTH(rms_norm, out)
  return RS_LAST_ERROR();
}

extern "C" int rs_add_rms_norm(const void* x, void* residual, const void* weight, void* y, i64 rows, i64 x_stride,
                               i64 residual_stride, i64 width, float eps, int plus_one, void* stream) {
  if (rows == 0) return 0;
  const Norm n = make_norm(x, weight, residual, rows, 1, x_stride, 0, residual_stride, width, eps, plus_one);
  const Bf16Out out = {(u16*)y};
  LAUNCH_BY_WIDTH(add_rms_norm, out)
  return RS_LAST_ERROR();
}

// scales is [rows, ceil(width / 128)]; y receives the bf16 norm too unless it is null.
extern "C" int rs_rms_norm_fp8(const void* x, const void* weight, void* values, void* scales, void* y, i64 rows,
                               i64 x_stride, i64 width, float eps, int plus_one, void* stream) {
  if (rows == 0) return 0;
  const Norm n = make_norm(x, weight, nullptr, rows, 1, x_stride, 0, 0, width, eps, plus_one);
  const Fp8Out out = {(unsigned char*)values, (float*)scales, (u16*)y};
  LAUNCH_BY_WIDTH(rms_norm_fp8, out)
  return RS_LAST_ERROR();
}
