"""Importers: rule files of other systems become documents of Baton's rule language."""
