"""Run inside the training process: the session, the resumable data order, the example scripts."""
