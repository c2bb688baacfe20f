"""On PYTHONPATH, all sessions of a job's processes wait at its gate behind each step that they report."""

import gate

from gpu_client.training import Session

gate.behind_each_report(Session)
