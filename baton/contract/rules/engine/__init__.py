"""The evaluator: from observations to verdicts."""
