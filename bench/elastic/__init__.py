"""Measure the data plane of elastic trainings: `make bench-elastic`."""
