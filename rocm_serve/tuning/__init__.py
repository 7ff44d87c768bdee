"""Ops at a model's shapes on the GPU that is here: what they must move, random operands, times, and the best tiles."""
