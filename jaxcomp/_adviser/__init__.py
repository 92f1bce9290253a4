"""Predicts step times, and recommends a reducer or none.

It answers before a run whether compression pays on a network. The bytes come from the reducers
themselves, the loss from `jaxcomp._bytes`, the time from a model whose constants are assumed or
measured.
"""
