"""Figures, reports, turns, and the control planes that benches measure."""
