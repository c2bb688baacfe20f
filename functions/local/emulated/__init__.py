"""Durability and ordered indexes for ministack, the emulated cloud.

`functions.local.emulator` starts `python -m functions.local.emulated` in an environment with ministack and without the
dependencies of Baton, so these modules import the standard library and ministack only.
"""
