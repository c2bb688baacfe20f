"""Show the worlds of elastic trainings, and plan their rounds."""
