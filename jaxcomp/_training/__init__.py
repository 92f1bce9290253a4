"""Wraps gradient functions and optimizers of a training step around a reducer.

`data_parallel` is the call that most users make: it maps a gradient function over the replicas
inside `jax.jit`, and runs the reducer there. `accumulate`, `hold_state` and `local_value_and_grad`
are for loops of other forms.
"""
