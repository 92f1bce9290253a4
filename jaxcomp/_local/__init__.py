"""Local SGD: replicas average parameters now and then, instead of gradients in every step.

There are two doors to one engine: `local_sgd` is an Optax transformation of single steps, and
`local_sgd_round` runs a whole round. Both use `sync` for the average, and keep a `LocalSGDState`.
"""
