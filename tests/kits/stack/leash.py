"""Run a module or script under a signal at the death of the test run: `leash.py SIGNAL TARGET ...`."""

import ctypes
import runpy
import sys

PR_SET_PDEATHSIG = 1
if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(sys.argv[1]))
sys.argv = sys.argv[2:]
sys.path[0] = ""
if sys.argv[0].endswith(".py"):
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
