"""Serve the calls of elastic jobs' nodes."""
