"""Translate rule files of other systems to documents of Baton's rule language."""
