"""Benches of cost and speed: see README.md."""
