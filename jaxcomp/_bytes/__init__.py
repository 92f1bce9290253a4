"""Chooses ranks for a budget of bytes or of loss.

It runs on the host, between runs, on NumPy arrays. What a rank saves is counted exactly; what it
costs in loss is predicted from recorded runs.
"""
