// The host's side of a launch where there is no ROCm: what `kernel<<<grid, threads>>>(...)` becomes ends in a function of
// the emulator. One launch at a time, on one thread.
#define RS_OFFLINE
#include "gpu.h"

namespace {
rs_offline_launcher launcher;
dim3 pushed_grid, pushed_threads;
hipStream_t pushed_stream;
int last_error;
}  // namespace

extern "C" void rs_offline_set_launcher(rs_offline_launcher function) { launcher = function; }

hipError_t __hipPushCallConfiguration(dim3 grid, dim3 threads, rs_size, hipStream_t stream) {
  pushed_grid = grid;
  pushed_threads = threads;
  pushed_stream = stream;
  return 0;
}

hipError_t __hipPopCallConfiguration(dim3* grid, dim3* threads, rs_size* lds, hipStream_t* stream) {
  *grid = pushed_grid;
  *threads = pushed_threads;
  *lds = 0;
  *stream = pushed_stream;
  return 0;
}

hipError_t hipLaunchKernel(const void* kernel, dim3 grid, dim3 threads, void** arguments, rs_size, hipStream_t) {
  last_error = launcher(kernel, grid.x, threads.x, arguments);
  return last_error;
}

// What the compiler calls when the library is loaded: there is no GPU to tell about its kernels.
extern "C" {
void** __hipRegisterFatBinary(const void*) { return nullptr; }
void __hipUnregisterFatBinary(void**) {}
void __hipRegisterFunction(void**, const void*, char*, const char*, unsigned, void*, void*, void*, void*, int*) {}
__attribute__((visibility("hidden"))) int atexit(void (*)()) { return 0; }
void __hipRegisterVar(void**, void*, char*, const char*, int, rs_size, int, int) {}
}

hipError_t hipGetLastError() {
  const int error = last_error;
  last_error = 0;
  return error;
}
