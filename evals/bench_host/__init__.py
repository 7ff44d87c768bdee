"""`make bench-host`: what a step and a streamed token cost on the host when the model costs nothing."""
