"""rocm_serve: a small multi-node server for Qwen3.5-family FP8 mixture-of-experts models on AMD GPUs."""

__version__ = "0.1.0"
