"""Lambda entry points."""

import gc
import os

# Loading makes some 100,000 objects and next to no garbage. By default the collector walks through them after every 700
# or so, which is a fifth of a cold start. So much garbage at once is some 20 MB.
gc.set_threshold(200_000, 10, 10)

# Nothing here uses plugins of pydantic; looking for some goes through every installed package.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
