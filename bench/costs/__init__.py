"""Costs of the control plane from counted calls and list prices."""
