"""Train one model on many machines that may vanish (DiLoCo)."""
