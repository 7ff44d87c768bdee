"""Decode and prefill on one GPU beside their floors: ops, and whole steps of the engine's own runner."""
