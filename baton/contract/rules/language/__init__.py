"""The rule language: from an expression's text to a checked, typed expression."""
