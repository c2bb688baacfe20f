"""Checkpoints of a training process: states as files, complete or absent."""
