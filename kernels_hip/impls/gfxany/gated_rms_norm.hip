// The norm at the output of Gated DeltaNet: a plain weight, then the gate.
// Formula: x / sqrt(mean(x^2) + eps) * w * act(gate). Reference: rocm_serve/ops/gated_rms_norm/reference.py.
#include "rows.h"

using namespace rs;

namespace {

constexpr int kSilu = 0;  // 1 is the sigmoid

struct Gated {
  const u16* x;
  const u16* gate;
  const void* weight;
  u16* y;
  Rows x_rows, gate_rows;
  u32 rows;
  int chunks;
  double inverse_width;
  float eps;
  int weight_is_float, activation;
};

__device__ __forceinline__ void gate_weight(const Gated& n, int chunk, float (&w)[8]) {
  if (n.weight_is_float) {
    const float* at = (const float*)n.weight + chunk * 8;
    const Vec16 low = load16(at), high = load16(at + 4);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      w[j] = bits_to_float(low.x[j]);
      w[j + 4] = bits_to_float(high.x[j]);
    }
  } else {
    unpack(load16((const u16*)n.weight + chunk * 8), w);
  }
}

__device__ __forceinline__ float activate(float g, int activation) {
  const float below = 1.f + exp_(-g);
  return (activation == kSilu ? g : 1.f) / below;
}

// LANES lanes have a row, each with up to CHUNKS chunks, LANES apart.
template <int LANES, int CHUNKS>
__device__ __forceinline__ void gated_rows(const Gated& n) {
  const int first = (int)(thread() % LANES);
  const u32 asked = block() * (256 / LANES) + thread() / LANES;
  const bool exists = asked < n.rows;
  const u32 row = exists ? asked : n.rows - 1;
  const u16* x = n.x + n.x_rows.start(row);
  const u16* gate = n.gate + n.gate_rows.start(row);
  Vec16 held[CHUNKS], gates[CHUNKS];
  double sum = 0;
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int chunk = first + i * LANES;
    if (chunk < n.chunks) {
      held[i] = load16_once(x + chunk * 8);
      gates[i] = load16_once(gate + chunk * 8);
      sum += squares(held[i]);
    }
  }
  const float factor = inverse_rms(sum_lanes<LANES>(sum), n.inverse_width, n.eps);
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int chunk = first + i * LANES;
    if (exists && chunk < n.chunks) {
      float value[8], g[8], w[8];
      unpack(held[i], value);
      unpack(gates[i], g);
      gate_weight(n, chunk, w);
#pragma unroll
      for (int j = 0; j < 8; j++) value[j] = value[j] * factor * w[j] * activate(g[j], n.activation);
      store16(n.y + ((i64)row * n.chunks + chunk) * 8, pack(value));
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) gated_rms_norm_128(Gated n) { gated_rows<16, 1>(n); }
extern "C" __global__ void __launch_bounds__(256) gated_rms_norm_512(Gated n) { gated_rows<32, 2>(n); }

struct GatedRmsNormCall {
  const void* x;
  const void* gate;
  const void* weight;
  void* y;
  i64 tokens, heads, x_stride, x_head_stride, gate_stride, gate_head_stride, width;
  float eps;
  int weight_is_float, activation;
  void* stream;
};

// x and gate are [tokens, heads, width], each with its own strides over tokens and heads; y is contiguous. Width at most
// 512. Otherwise as rs_rms_norm.
extern "C" int rs_gated_rms_norm(const GatedRmsNormCall* call) {
  const GatedRmsNormCall& c = *call;
  const i64 rows = c.tokens * c.heads;
  if (rows == 0) return 0;
  const Gated n = {(const u16*)c.x,
                   (const u16*)c.gate,
                   c.weight,
                   (u16*)c.y,
                   {c.x_stride, c.x_head_stride, (u32)c.heads},
                   {c.gate_stride, c.gate_head_stride, (u32)c.heads},
                   (u32)rows,
                   (int)(c.width / 8),
                   1.0 / (double)c.width,
                   c.eps,
                   c.weight_is_float,
                   c.activation};
  const gpu_stream stream = (gpu_stream)c.stream;
  if (c.width <= 128)
    gated_rms_norm_128<<<(n.rows + 15) / 16, 256, 0, stream>>>(n);
  else
    gated_rms_norm_512<<<(n.rows + 7) / 8, 256, 0, stream>>>(n);
  return RS_LAST_ERROR();
}
