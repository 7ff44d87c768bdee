"""Collectives beyond what a Comm has: fused with what follows them, or by a vendor's library."""

# Of AITER's sums: above this many bytes it writes straight into its peers' outputs on gfx942 with 8 ranks, and several
# such sums in one graph take each other's place (ROCm/aiter pull request 4974). Each staging buffer of a rank has it.
AITER_MAX_BYTES = 4 << 20
AITER_STAGING_BUFFERS = 3  # two that peers read and write, one of inputs
