"""The session: progress, stop requests, checkpoints and exact resume for a training loop."""
