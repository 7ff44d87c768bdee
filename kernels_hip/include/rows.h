// Rows of bf16 and their sums of squares. Letters: a "chunk" is 8 columns, 16 bytes.
//
// Squares of bf16 are exact in fp32 and their sum is kept in fp64: rounded to fp32 it does not depend on the order of
// the additions, so a row has the same bits in every kernel, on every architecture, alone and among others.
#pragma once

#include "gpu.h"

namespace rs {

// Where row r of a [outer, inner, width] tensor begins, in elements. Strides are multiples of 8.
struct Rows {
  i64 outer_stride, inner_stride;
  u32 inner;
  __device__ __forceinline__ i64 start(u32 row) const {
    if (inner == 1) return (i64)row * outer_stride;
    return (i64)(row / inner) * outer_stride + (i64)(row % inner) * inner_stride;
  }
};

__device__ __forceinline__ void unpack(Vec16 raw, float (&x)[8]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    x[2 * j] = low_bf16(raw.x[j]);
    x[2 * j + 1] = high_bf16(raw.x[j]);
  }
}

__device__ __forceinline__ Vec16 pack(const float (&x)[8]) {
  Vec16 raw;
#pragma unroll
  for (int j = 0; j < 4; j++) raw.x[j] = pack_bf16(x[2 * j], x[2 * j + 1]);
  return raw;
}

// The sum as bf16 has it: it is what the residual stream holds and what is normalised.
__device__ __forceinline__ Vec16 add(Vec16 a, Vec16 b) {
  float x[8], y[8];
  unpack(a, x);
  unpack(b, y);
#pragma unroll
  for (int j = 0; j < 8; j++) x[j] += y[j];
  return pack(x);
}

// In pairs: additions in fp64 take long, and these do not wait for each other.
__device__ __forceinline__ double squares(Vec16 raw) {
  float x[8];
  unpack(raw, x);
  double sum[4];
#pragma unroll
  for (int j = 0; j < 4; j++) sum[j] = (double)(x[2 * j] * x[2 * j]) + (double)(x[2 * j + 1] * x[2 * j + 1]);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// 1 + w, or w as it is; 8 columns of a bf16 weight.
__device__ __forceinline__ void scale_of(Vec16 weight, bool plus_one, float (&scale)[8]) {
  unpack(weight, scale);
#pragma unroll
  for (int j = 0; j < 8; j++) scale[j] = plus_one ? scale[j] + 1.f : scale[j];
}

// 1 / rms of a row whose squares sum to `sum`. `inverse_width` is 1 / H, from the host, in fp64.
__device__ __forceinline__ float inverse_rms(double sum, double inverse_width, float eps) {
  return rsqrt_rounded((float)(sum * inverse_width) + eps);
}

// The sum over groups of LANES neighbouring lanes; every lane receives it. LANES is a power of two up to a wave.
template <int LANES>
__device__ __forceinline__ double sum_lanes(double x) {
  const int own = lane();
#pragma unroll
  for (int step = LANES / 2; step; step >>= 1) x += from_lane(x, own ^ step);
  return x;
}

template <int THREADS>
__device__ __forceinline__ double sum_block(double x) {
  constexpr int kWaves = THREADS / kWave;
  __shared__ double partial[kWaves];
  x = sum_lanes<kWave>(x);
  if (lane() == 0) partial[thread() / kWave] = x;
  barrier();
  x = 0;
#pragma unroll
  for (int wave = 0; wave < kWaves; wave++) x += partial[wave];
  return x;
}

}  // namespace rs
