"""Carry the wire's frames through the object store, between nodes that do not reach each other."""
