"""`make bench-checkpoint`: cost of taking, storing and fetching checkpoints, compared with rivals."""
