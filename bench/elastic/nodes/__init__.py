"""Run nodes of an elastic training as processes: real connections, faults at exact points, and a trace of each node."""
