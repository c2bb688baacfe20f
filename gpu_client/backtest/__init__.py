"""Rules tried on what trainings reported."""
