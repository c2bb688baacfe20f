"""The web console: its sources and their build."""
