"""The accuracy gate: lm-eval against a running server, judged against a reference by exact statistics."""
