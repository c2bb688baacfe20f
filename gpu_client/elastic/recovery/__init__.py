"""Bring a node to the outer state of its peers."""
