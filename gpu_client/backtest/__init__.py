"""Read recorded runs from files."""
