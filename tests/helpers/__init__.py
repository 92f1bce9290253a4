"""Helpers for tests of several subjects: runners of steps, oracles, tolerances, processes."""
