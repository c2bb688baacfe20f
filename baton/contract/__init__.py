"""What both sides agree on: wire models, error codes, the checkpoint manifest, the recipe schema.

Imports pydantic and the standard library only.
"""
