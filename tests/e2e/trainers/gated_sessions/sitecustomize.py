"""On PYTHONPATH, all sessions of a job's processes wait at its gate behind each step that they report."""

import gate

from baton import Session

gate.behind_each_report(Session)
