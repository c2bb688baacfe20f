"""Decide the next state of jobs, without I/O. Callers pass clock, randomness and records."""
