"""Fake of RunPod's REST API v2."""
