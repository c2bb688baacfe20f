"""Replay rules on recorded runs. Pure; needs the standard library alone."""
