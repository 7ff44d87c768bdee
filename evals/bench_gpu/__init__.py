"""Decode on one GPU beside its floor: ops, and whole steps of the engine's own runner. `python -m evals.bench_gpu`."""
