"""Recipes: the language that describes training tools. See README.md."""
