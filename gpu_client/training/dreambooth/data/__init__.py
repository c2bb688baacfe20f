"""Read the pictures of a Dreambooth job and order their batches."""
