"""Calls of the API: requests, units, latency, claims, cold starts."""
