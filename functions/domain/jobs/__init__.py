"""Decide the transitions of jobs and attempts, and check the fences of writes."""
