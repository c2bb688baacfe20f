"""Demos of the whole product on one machine: `make demo`, `make demo-rules`, `make demo-ring`."""
