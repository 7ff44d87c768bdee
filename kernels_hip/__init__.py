"""Hand-written GPU kernels: one source for ROCm and CUDA, one shared library with C entry points. See build.py."""
