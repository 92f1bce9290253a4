"""What the library costs and what it saves, measured; each part is a command with ``--help``.

Run from the root of the repository: ``python -m benchmarks.cluster``, ``.overhead``,
``.convergence``, ``.optimizers``, ``.card``,
``.time_to_loss``, ``.gpu_program``, ``.bridge_memory``.
"""
