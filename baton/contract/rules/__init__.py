"""The rule language: what watches and steers a running training."""
