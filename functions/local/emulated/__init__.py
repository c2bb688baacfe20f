"""What runs inside the emulator's own environment: ministack, made durable and given ordered indexes.

Started as `python -m functions.local.emulated` by `functions.local.emulator`. That environment holds ministack
and nothing of ours, so these modules import the standard library and ministack only.
"""
