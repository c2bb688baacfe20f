"""Circular cache of generated samples between many generators and one training: see README.md."""
