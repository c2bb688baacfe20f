"""The pictures of a Dreambooth job and the order of their batches."""
