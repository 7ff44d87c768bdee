"""How rows reach the experts that other ranks hold: one contract, four ways."""
