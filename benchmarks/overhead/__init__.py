"""Measures the time of compression alone on one device."""
