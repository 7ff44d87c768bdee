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

// A kernel's name says how many columns it takes. Blocks of 128 threads where a row is short: an SM or CU then has
// more rows on their way while others are summed.
#define NORM_KERNEL(NAME, THREADS, LANES, CHUNKS, ADD, OUT)                       \
  extern "C" __global__ void __launch_bounds__(THREADS) NAME(Norm n, OUT out) {   \
    norm_rows<THREADS, LANES, CHUNKS, ADD>(n, out);                               \
  }
#define NORM_KERNELS(NAME, ADD, OUT)                      \
  NORM_KERNEL(NAME##_512, kRowsThreads, 32, 2, ADD, OUT)  \
  NORM_KERNEL(NAME##_2048, 128, 0, 2, ADD, OUT)           \
  NORM_KERNEL(NAME##_4096, 128, 0, 4, ADD, OUT)           \
  NORM_KERNEL(NAME##_8192, 256, 0, 4, ADD, OUT)           \
  NORM_KERNEL(NAME##_16384, 512, 0, 4, ADD, OUT)
NORM_KERNELS(rms_norm, false, Bf16Out)
NORM_KERNELS(add_rms_norm, true, Bf16Out)
NORM_KERNELS(rms_norm_fp8, false, Fp8Out)
NORM_KERNEL(rms_norm_128, kRowsThreads, 16, 1, false, Bf16Out)

#define LAUNCH(NAME, THREADS, PER_BLOCK, OUT) \
  NAME<<<(n.rows + (PER_BLOCK) - 1) / (PER_BLOCK), THREADS, 0, (gpu_stream)c.stream>>>(n, OUT)
#define LAUNCH_BY_WIDTH(NAME, OUT)            \
  if (c.width <= 512)                         \
    LAUNCH(NAME##_512, kRowsThreads, 8, OUT); \
  else if (c.width <= 2048)                   \
    LAUNCH(NAME##_2048, 128, 1, OUT);         \
  else if (c.width <= 4096)                   \
    LAUNCH(NAME##_4096, 128, 1, OUT);         \
  else if (c.width <= 8192)                   \
    LAUNCH(NAME##_8192, 256, 1, OUT);         \
  else                                        \
    LAUNCH(NAME##_16384, 512, 1, OUT);

template <class Call>
static Norm make_norm(const Call& c, void* residual, Rows x_rows, i64 residual_stride) {
  return {(const u16*)c.x, (const u16*)c.weight, (u16*)residual,        x_rows, {residual_stride, 0, 1},
          (u32)c.rows,     (int)(c.width / 8),   1.0 / (double)c.width, c.eps,  c.plus_one};
}

// Entry points take one struct, which Python packs (rocm_serve/ops/hip_library.py). Pointers are 16-byte aligned, strides
// (in elements) and width multiples of 8, width at most 16384, rows fewer than 2^31; the caller has checked.
// They return the runtime's error code, 0 when the launch was accepted.

struct RmsNormCall {
  const void* x;
  const void* weight;
  void* y;
  i64 rows, inner, outer_stride, inner_stride, width;
  float eps;
  int plus_one;
  void* stream;
};

// Row r of x is at (r / inner) * outer_stride + (r % inner) * inner_stride.
extern "C" int rs_rms_norm(const RmsNormCall* call) {
  const RmsNormCall& c = *call;
  if (c.rows == 0) return 0;
  const Norm n = make_norm(c, nullptr, {c.outer_stride, c.inner_stride, (u32)c.inner}, 0);
  const Bf16Out out = {(u16*)c.y};
  if (c.width <= 128)
    LAUNCH(rms_norm_128, kRowsThreads, 16, out);
  else
    LAUNCH_BY_WIDTH(rms_norm, out)
  return RS_LAST_ERROR();
}

struct AddRmsNormCall {
  const void* x;
  void* residual;
  const void* weight;
  void* y;
  i64 rows, x_stride, residual_stride, width;
  float eps;
  int plus_one;
  void* stream;
};

extern "C" int rs_add_rms_norm(const AddRmsNormCall* call) {
  const AddRmsNormCall& c = *call;
  if (c.rows == 0) return 0;
  const Norm n = make_norm(c, c.residual, {c.x_stride, 0, 1}, c.residual_stride);
  const Bf16Out out = {(u16*)c.y};
  LAUNCH_BY_WIDTH(add_rms_norm, out)
  return RS_LAST_ERROR();
}

struct RmsNormFp8Call {
  const void* x;
  const void* weight;
  void* values;
  void* scales;  // [rows, ceil(width / 128)]
  void* y;       // receives the bf16 norm too, unless it is null
  i64 rows, x_stride, width;
  float eps;
  int plus_one;
  void* stream;
};

extern "C" int rs_rms_norm_fp8(const RmsNormFp8Call* call) {
  const RmsNormFp8Call& c = *call;
  if (c.rows == 0) return 0;
  const Norm n = make_norm(c, nullptr, {c.x_stride, 0, 1}, 0);
  const Fp8Out out = {(unsigned char*)c.values, (float*)c.scales, (u16*)c.y};
  LAUNCH_BY_WIDTH(rms_norm_fp8, out)
  return RS_LAST_ERROR();
}
