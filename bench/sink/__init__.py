"""A fast S3 on loopback as the store for measured clients."""
