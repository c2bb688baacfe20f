"""Decide the membership of an elastic job's world, and reconcile the job with its seats."""
