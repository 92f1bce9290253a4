"""Lists and checks the collectives of a compiled step.

The compiled program is the only proof of what a step sends. It is read from XLA's own message,
without a copy of XLA's rules.
"""
