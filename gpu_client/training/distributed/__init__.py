"""Reach agreement between the processes of one training run, independent of the session."""
