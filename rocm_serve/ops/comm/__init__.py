"""Collectives beyond what a Comm has: fused with what follows them, or by a vendor's library."""
