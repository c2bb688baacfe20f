"""Overhead of agent and session on real trainings."""
