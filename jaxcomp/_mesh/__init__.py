"""Replicas: the mapped axes, what crosses between them, and what each has of its own."""
