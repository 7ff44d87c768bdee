"""How often each expert is chosen, and where experts had better be."""
