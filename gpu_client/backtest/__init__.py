"""Replay rules on recorded runs."""
