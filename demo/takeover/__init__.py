"""`make demo`: another worker takes over the job of a worker that was killed."""
