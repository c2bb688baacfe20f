"""The trainer controller: rules on a running training, and what they and live commands do to it."""
