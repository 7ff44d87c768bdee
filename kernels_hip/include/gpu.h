// What the kernels need of a GPU, on ROCm and CUDA alike: hipcc, clang -x hip without any ROCm installed, nvcc.
//
// Every loop runs as often in all lanes of a wave: where it does not, clang 22 from -O2 on may read a loop's counter after
// the last lane has left (its MachineSink), and lanes that left before get a wrong number.
//
// Without ROCm's headers (-DRS_OFFLINE) the few words of HIP that are used are declared here, for the device, and in
// offline_host.h, for the host: that is how the kernels are compiled and executed where there is no GPU.
#pragma once

#if defined(__HIP__) || defined(__HIPCC__)
  #define RS_AMD 1
  #if defined(RS_OFFLINE)
    #define __host__ __attribute__((host))
    #define __device__ __attribute__((device))
    #define __global__ __attribute__((global))
    #define __shared__ __attribute__((shared))
    // As HIP's own header has it: the attribute launch_bounds is taken without a word and changes nothing.
    #define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
    #define __forceinline__ inline __attribute__((always_inline))
    #include "offline_host.h"
  #else
    #include <hip/hip_runtime.h>
  #endif
  typedef hipStream_t gpu_stream;
  #define RS_LAST_ERROR() ((int)hipGetLastError())
#else
  #include <cuda_fp8.h>
  #include <cuda_runtime.h>
  typedef cudaStream_t gpu_stream;
  #define RS_LAST_ERROR() ((int)cudaGetLastError())
#endif

namespace rs {

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

struct alignas(16) Vec16 {  // one 16-byte access
  u32 x[4];
};
struct alignas(8) Vec8 {
  u32 x[2];
};

#if defined(RS_AMD)
  #define RS_BITS(to, value) __builtin_bit_cast(to, value)
typedef u32 u32x4 __attribute__((ext_vector_type(4)));
typedef u32 u32x2 __attribute__((ext_vector_type(2)));
  #if defined(__GFX9__) || !defined(__HIP_DEVICE_COMPILE__)
constexpr int kWave = 64;
  #else
constexpr int kWave = 32;
  #endif
#else
constexpr int kWave = 32;
#endif

#if defined(RS_AMD) && defined(__HIP_DEVICE_COMPILE__)

__device__ __forceinline__ u32 thread() { return __builtin_amdgcn_workitem_id_x(); }
__device__ __forceinline__ u32 block() { return __builtin_amdgcn_workgroup_id_x(); }
__device__ __forceinline__ void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
__device__ __forceinline__ int lane() {
  const u32 low = __builtin_amdgcn_mbcnt_lo(~0u, 0u);
  return (int)(kWave == 64 ? __builtin_amdgcn_mbcnt_hi(~0u, low) : low);
}
__device__ __forceinline__ u32 from_lane(u32 value, int source) {
  return (u32)__builtin_amdgcn_ds_bpermute(source << 2, (int)value);
}
__device__ __forceinline__ float bits_to_float(u32 bits) { return __builtin_bit_cast(float, bits); }
__device__ __forceinline__ u32 float_to_bits(float x) { return __builtin_bit_cast(u32, x); }
__device__ __forceinline__ double words_to_double(u32 low, u32 high) {
  return __builtin_bit_cast(double, (unsigned long long)high << 32 | low);
}
__device__ __forceinline__ void double_to_words(double x, u32& low, u32& high) {
  const unsigned long long bits = __builtin_bit_cast(unsigned long long, x);
  low = (u32)bits;
  high = (u32)(bits >> 32);
}
__device__ __forceinline__ float rsqrt_near(float x) { return __builtin_amdgcn_rsqf(x); }
__device__ __forceinline__ float exp2_near(float x) { return __builtin_amdgcn_exp2f(x); }
__device__ __forceinline__ float round_even(float x) { return __builtin_rintf(x); }
__device__ __forceinline__ float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
__device__ __forceinline__ double fma_(double a, double b, double c) { return __builtin_fma(a, b, c); }
__device__ __forceinline__ float abs_(float x) { return __builtin_fabsf(x); }
__device__ __forceinline__ float max_(float a, float b) { return __builtin_fmaxf(a, b); }
__device__ __forceinline__ float min_(float a, float b) { return __builtin_fminf(a, b); }
__device__ __forceinline__ Vec16 load16(const void* p) { return __builtin_bit_cast(Vec16, *(const u32x4*)p); }
__device__ __forceinline__ Vec16 load16_once(const void* p) {
  return __builtin_bit_cast(Vec16, __builtin_nontemporal_load((const u32x4*)p));
}
__device__ __forceinline__ void store16(void* p, Vec16 v) { *(u32x4*)p = __builtin_bit_cast(u32x4, v); }
__device__ __forceinline__ void store8(void* p, Vec8 v) { *(u32x2*)p = __builtin_bit_cast(u32x2, v); }

#elif !defined(RS_AMD)

__device__ __forceinline__ u32 thread() { return threadIdx.x; }
__device__ __forceinline__ u32 block() { return blockIdx.x; }
__device__ __forceinline__ void barrier() { __syncthreads(); }
__device__ __forceinline__ int lane() { return (int)(threadIdx.x & 31); }
__device__ __forceinline__ u32 from_lane(u32 value, int source) { return __shfl_sync(0xffffffffu, value, source); }
__device__ __forceinline__ float bits_to_float(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 float_to_bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ double words_to_double(u32 low, u32 high) { return __hiloint2double((int)high, (int)low); }
__device__ __forceinline__ void double_to_words(double x, u32& low, u32& high) {
  low = (u32)__double2loint(x);
  high = (u32)__double2hiint(x);
}
__device__ __forceinline__ float rsqrt_near(float x) { return rsqrtf(x); }
__device__ __forceinline__ float exp2_near(float x) { return exp2f(x); }
__device__ __forceinline__ float round_even(float x) { return rintf(x); }
__device__ __forceinline__ float fma_(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double fma_(double a, double b, double c) { return __fma_rn(a, b, c); }
__device__ __forceinline__ float abs_(float x) { return fabsf(x); }
__device__ __forceinline__ float max_(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float min_(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ Vec16 load16(const void* p) {
  const uint4 v = *(const uint4*)p;
  return {{v.x, v.y, v.z, v.w}};
}
__device__ __forceinline__ Vec16 load16_once(const void* p) {
  const uint4 v = __ldcs((const uint4*)p);
  return {{v.x, v.y, v.z, v.w}};
}
__device__ __forceinline__ void store16(void* p, Vec16 v) { *(uint4*)p = make_uint4(v.x[0], v.x[1], v.x[2], v.x[3]); }
__device__ __forceinline__ void store8(void* p, Vec8 v) { *(uint2*)p = make_uint2(v.x[0], v.x[1]); }

#else  // the host's pass of clang reads device code without running it

__device__ u32 thread();
__device__ u32 block();
__device__ void barrier();
__device__ int lane();
__device__ u32 from_lane(u32, int);
__device__ float bits_to_float(u32);
__device__ u32 float_to_bits(float);
__device__ double words_to_double(u32, u32);
__device__ void double_to_words(double, u32&, u32&);
__device__ float rsqrt_near(float);
__device__ float exp2_near(float);
__device__ float round_even(float);
__device__ float fma_(float, float, float);
__device__ double fma_(double, double, double);
__device__ float abs_(float);
__device__ float max_(float, float);
__device__ float min_(float, float);
__device__ Vec16 load16(const void*);
__device__ Vec16 load16_once(const void*);  // of what nobody reads again soon: it leaves the caches to weights
__device__ void store16(void*, Vec16);
__device__ void store8(void*, Vec8);

#endif

__device__ __forceinline__ float from_lane(float value, int source) {
  return bits_to_float(from_lane(float_to_bits(value), source));
}
__device__ __forceinline__ double from_lane(double value, int source) {
  u32 low, high;
  double_to_words(value, low, high);
  return words_to_double(from_lane(low, source), from_lane(high, source));
}

// bf16, two to a word.
__device__ __forceinline__ float low_bf16(u32 pair) { return bits_to_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return bits_to_float(pair & 0xffff0000u); }

// Round to nearest, ties to even; a NaN stays one.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
#if defined(__gfx950__)
  typedef __bf16 bf16x2 __attribute__((ext_vector_type(2)));
  const bf16x2 pair = {(__bf16)low, (__bf16)high};
  return __builtin_bit_cast(u32, pair);
#else
  u32 a = float_to_bits(low), b = float_to_bits(high);
  a = low != low ? 0x7fc00000u : a + 0x7fffu + ((a >> 16) & 1u);
  b = high != high ? 0x7fc00000u : b + 0x7fffu + ((b >> 16) & 1u);
  return (a >> 16) | (b & 0xffff0000u);
#endif
}

// Four fp32 that are within the range, to e4m3 of this architecture: fnuz on gfx942, fn elsewhere.
#if defined(__gfx942__)
constexpr float kFp8Max = 224.f;  // not fnuz's own 240: the value that the released kernels use
#else
constexpr float kFp8Max = 448.f;
#endif
__device__ __forceinline__ u32 pack_fp8(float a, float b, float c, float d) {
#if defined(__gfx942__) || defined(__gfx950__) || defined(__gfx12__)
  const int half = __builtin_amdgcn_cvt_pk_fp8_f32(a, b, 0, false);
  return (u32)__builtin_amdgcn_cvt_pk_fp8_f32(c, d, half, true);
#elif defined(__CUDA_ARCH__)
  const u32 low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const u32 high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
#else
  return 0;  // no architecture that these kernels are built for comes here
#endif
}

// exp(x), within about one unit of fp32. Below 2^-126 it gives 2^-126: its users add one to it.
__device__ __forceinline__ float exp_(float x) {
  const float n = round_even(x * 1.44269504f);
  float f = fma_(x, 1.44269504f, -n);
  f = fma_(x, 1.92596300e-8f, f);  // log2(e) - 1.44269504f
  const float power = max_(min_(n, 128.f), -126.f);
  return exp2_near(f) * bits_to_float((u32)((int)power + 127) << 23);
}

// 1 / sqrt(x) rounded once: the hardware's answer is a unit off now and then, and differs between makers.
__device__ __forceinline__ float rsqrt_rounded(float x) {
  const float near = rsqrt_near(x);
  if (!(x > 1e-30f && x < 3e38f)) return near;
  double y = near;
  const double half = 0.5 * (double)x;
  y = y * fma_(-half * y, y, 1.5);
  y = y * fma_(-half * y, y, 1.5);
  return (float)y;
}

}  // namespace rs
