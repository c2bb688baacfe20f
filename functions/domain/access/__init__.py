"""Decide about keys, ring tokens and addresses of webhooks."""
