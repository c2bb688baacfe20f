"""Demonstrate a training on several machines, of which one is killed, one freezes and one joins."""
