"""Control a running training by rules and live commands."""
