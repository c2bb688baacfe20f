"""Distribute the shards of the data among the nodes of an elastic training."""
