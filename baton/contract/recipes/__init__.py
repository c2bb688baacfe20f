"""Recipes: the language in which training tools are described. See README.md."""
