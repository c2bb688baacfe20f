"""Decide by a job's rules and commands."""
