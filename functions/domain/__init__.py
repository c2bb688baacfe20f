"""Pure rules: what a job may do next. No boto3, no clock, no randomness: they are handed in."""
