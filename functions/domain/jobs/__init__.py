"""Decide the transitions of jobs and attempts, and who may write."""
