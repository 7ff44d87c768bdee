// HIP's host side in the few words that a launch takes, for machines without ROCm. A launch ends in the function that
// rs_offline_set_launcher was given: the emulator's.
#pragma once

struct dim3 {
  unsigned x, y, z;
  __host__ __device__ constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
typedef void* hipStream_t;
typedef int hipError_t;
typedef decltype(sizeof(0)) rs_size;

// `kernel` is the address of the symbol that has the kernel's name. Returns 0, or a code that the entry point hands on.
typedef int (*rs_offline_launcher)(const void* kernel, unsigned grid, unsigned threads, void** arguments);

extern "C" {
__host__ hipError_t __hipPushCallConfiguration(dim3 grid, dim3 threads, rs_size lds, hipStream_t stream);
__host__ hipError_t __hipPopCallConfiguration(dim3* grid, dim3* threads, rs_size* lds, hipStream_t* stream);
__host__ hipError_t hipLaunchKernel(const void* kernel, dim3 grid, dim3 threads, void** args, rs_size lds, hipStream_t);
__host__ hipError_t hipGetLastError();
}
