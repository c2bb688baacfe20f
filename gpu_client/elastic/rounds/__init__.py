"""Decide and run the rounds of an elastic training."""
