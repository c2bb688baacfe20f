"""`make demo-ring`: a training reads generated samples from a ring while its generators are killed."""
