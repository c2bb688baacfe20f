"""Reduce deltas among the members of an epoch."""
