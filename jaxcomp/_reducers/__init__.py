"""Reducers: Optax transformations that turn local gradients into their average.

`reducer` defines what a reducer is and checks its arguments; each other file is one reducer, or a
part of `powersgd`. A reducer sees one replica's gradients and state, and runs inside of a mapped
function.
"""
