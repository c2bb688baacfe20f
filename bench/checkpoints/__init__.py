"""`make bench-checkpoint`: what taking, storing and fetching checkpoints costs, against the ways of others."""
