"""The agent on a machine whose wall clock is wrong by BATON_SKEW_S seconds."""

import os
import runpy
import time

_real = time.time
_skew_s = float(os.environ["BATON_SKEW_S"])
time.time = lambda: _real() + _skew_s
runpy.run_module("gpu_client.agent", run_name="__main__", alter_sys=True)
