"""Metric histories: windows and running statistics over their points."""
