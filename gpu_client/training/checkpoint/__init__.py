"""Write and read the checkpoints of a training process: states as files, complete or absent."""
