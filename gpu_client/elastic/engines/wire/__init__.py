"""Reduce deltas over TCP with mutual TLS."""
