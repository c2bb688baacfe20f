"""Decide, without I/O, what a job may do next. Callers hand in clock, randomness and records."""
