"""Make all sessions of a job wait at the job's gate after each reported step: Python imports this from PYTHONPATH."""

import deferred_compiler  # noqa: F401 - before torch
import gate

from baton import Session

gate.behind_each_report(Session)
