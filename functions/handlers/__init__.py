"""Lambda entry points."""

import gc
import os

# Loading creates some 100,000 objects and almost no garbage. By default the collector runs after every 700 allocations,
# which takes a fifth of a cold start. The higher threshold lets at most some 20 MB of garbage accumulate.
gc.set_threshold(200_000, 10, 10)

# The functions use no plugin of pydantic, and the search for plugins reads every installed package.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
