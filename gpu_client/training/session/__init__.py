"""Provide the session of a training loop: progress, stop requests, checkpoints and exact resume."""
