"""Measurements of what the library costs and saves; each part is a command with ``--help``.

Run from the root of the repository: ``python -m benchmarks.cluster``, ``.overhead``,
``.convergence``, ``.optimizers``, ``.card``,
``.time_to_loss``, ``.gpu_program``, ``.bridge_memory``.
"""
