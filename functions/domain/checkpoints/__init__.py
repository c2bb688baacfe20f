"""Decide which checkpoints, packs and outputs exist, and which may be deleted."""
