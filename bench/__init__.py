"""Cost and speed, measured: see README.md."""
