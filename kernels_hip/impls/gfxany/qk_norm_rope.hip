// Query and key heads normalised and rotated, all in one launch. Without rotated dimensions it is the per-head norm.
// Formula: n = x / sqrt(mean(x^2) + eps) * (1 + w); (a, b) = (n[:R], n[R:2R]) -> (a cos - b sin, b cos + a sin).
// Reference: rocm_serve/ops/qk_norm_rope/reference.py.
#include "rows.h"

using namespace rs;

namespace {

constexpr int kLanes = 32;  // of a head: 8 columns each, so a head has up to 256
constexpr int kThreads = 256;

struct Heads {
  const u16* x;
  const u16* weight;
  u16* y;
  i64 stride, head_stride;
  u32 heads;
};

struct Turn {
  const float* cos;  // [positions, half]
  const float* sin;
  const i64* positions;
  int half_chunks;  // R / 8
};

__device__ __forceinline__ void load_angles(const float* row, int chunk, float (&x)[8]) {
  const Vec16 low = load16(row + chunk * 8), high = load16(row + chunk * 8 + 4);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    x[j] = bits_to_float(low.x[j]);
    x[j + 4] = bits_to_float(high.x[j]);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    qk_norm_rope_256(Heads q, Heads k, Turn turn, u32 rows, int chunks, double inverse_width, float eps) {
  const int chunk = (int)(thread() % kLanes);
  const u32 asked = block() * (kThreads / kLanes) + thread() / kLanes;
  const bool exists = asked < rows;
  const u32 row = exists ? asked : rows - 1;
  const u32 both = q.heads + k.heads, token = row / both, head = row % both;
  const bool is_q = head < q.heads;
  // Field by field: a choice between the two structs would put them into memory.
  const u16* x = is_q ? q.x : k.x;
  const u16* weight = is_q ? q.weight : k.weight;
  u16* y = is_q ? q.y : k.y;
  const i64 stride = is_q ? q.stride : k.stride, head_stride = is_q ? q.head_stride : k.head_stride;
  const u32 heads = is_q ? q.heads : k.heads, own = is_q ? head : head - q.heads;
  const bool live = chunk < chunks;
  Vec16 held = {};
  if (live) held = load16(x + (i64)token * stride + (i64)own * head_stride + chunk * 8);
  const double sum = sum_lanes<kLanes>(squares(held));
  const float factor = inverse_rms(sum, inverse_width, eps);
  float value[8], scale[8] = {};
  unpack(held, value);
  if (live) scale_of(load16(weight + chunk * 8), true, scale);
#pragma unroll
  for (int j = 0; j < 8; j++) value[j] = value[j] * factor * scale[j];
  const int half = turn.half_chunks;
  if (half > 0) {
    const bool first = chunk < half, second = !first && chunk < 2 * half;
    const int partner = lane() + (first ? half : second ? -half : 0);
    float other[8];
#pragma unroll
    for (int j = 0; j < 8; j++) other[j] = from_lane(value[j], partner);
    if (first || second) {
      const i64 at = turn.positions[token] * (half * 8);
      float cos[8], sin[8];
      load_angles(turn.cos + at, first ? chunk : chunk - half, cos);
      load_angles(turn.sin + at, first ? chunk : chunk - half, sin);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const float turned = other[j] * sin[j];
        value[j] = value[j] * cos[j] + (first ? -turned : turned);
      }
    }
  }
  if (exists && live) store16(y + (((i64)token * heads + own) * chunks + chunk) * 8, pack(value));
}

struct QkNormRopeCall {
  const void* q;
  const void* k;
  const void* q_weight;
  const void* k_weight;
  void* q_out;
  void* k_out;
  const void* cos;
  const void* sin;
  const void* positions;
  i64 tokens, q_heads, k_heads, q_stride, q_head_stride, k_stride, k_head_stride, width, half;
  float eps;
  void* stream;
};

// q and k are [tokens, heads, width] with strides over tokens and heads; results are contiguous. Width at most 256,
// `half` (R) a multiple of 8 and 2 R at most the width; positions are int64, each a row of cos and sin (fp32 [P, R]).
extern "C" int rs_qk_norm_rope(const QkNormRopeCall* call) {
  const QkNormRopeCall& c = *call;
  const i64 rows = c.tokens * (c.q_heads + c.k_heads);
  if (rows == 0) return 0;
  const Heads queries = {(const u16*)c.q, (const u16*)c.q_weight, (u16*)c.q_out, c.q_stride, c.q_head_stride,
                         (u32)c.q_heads};
  const Heads keys = {(const u16*)c.k, (const u16*)c.k_weight, (u16*)c.k_out, c.k_stride, c.k_head_stride,
                      (u32)c.k_heads};
  const Turn turn = {(const float*)c.cos, (const float*)c.sin, (const i64*)c.positions, (int)(c.half / 8)};
  qk_norm_rope_256<<<(u32)((rows + 7) / 8), kThreads, 0, (gpu_stream)c.stream>>>(
      queries, keys, turn, (u32)rows, (int)(c.width / 8), 1.0 / (double)c.width, c.eps);
  return RS_LAST_ERROR();
}
