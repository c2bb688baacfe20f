"""`make demo-fleet`: a fleet rents machines for a job within a budget, loses one, and gives all of them back."""
