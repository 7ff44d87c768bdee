"""Parity: the same tokens through two ways of computing them, and where the two first part."""
