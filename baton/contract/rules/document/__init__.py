"""Rule documents: from YAML or JSON to checked rules."""
