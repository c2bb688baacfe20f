"""The trainer controller: rules and live commands that act on a running training."""
