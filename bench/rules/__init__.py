"""Rules in a training, at several ranks, under edits, and in the back-test."""
