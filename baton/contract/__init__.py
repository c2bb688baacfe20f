"""Wire models, error codes, checkpoint manifest and recipe schema, shared by the control plane and its clients.

The package imports pydantic and the standard library only.
"""
