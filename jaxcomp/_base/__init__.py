"""Types, trees, dtypes and checks of arguments, for all other wings.

Nothing here knows of replicas or of a mesh. What two other wings need, and what is about leaves and
not about axes, is here.
"""
