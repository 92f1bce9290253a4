"""Predicts step times, and recommends a reducer or none."""
