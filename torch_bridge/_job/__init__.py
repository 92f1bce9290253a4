"""Runs inside a torch job: saves complete checkpoints, and resumes from converted ones.

These functions take DDP models and hook states, and import torch when they are called.
"""
