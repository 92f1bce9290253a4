"""Records what each reducer gives, to be compared after a change on the same machine.

python tests/support/record.py out.npz [--quick]                 outputs, residuals and factors
python tests/support/record.py --compare before.npz after.npz    what is not equal bit for bit

The options are those of `test_recorded.py`, which compares with outputs of commit d55f995. Here
they run under every mapping, with every dtype of gradients and with one step that is not finite.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
sys.path.append(str(Path(__file__).parents[1] / "jaxcomp" / "reducers"))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from runners import AXIS, MAPPINGS, first, sharded, simulate
from test_recorded import CASES, REPLICAS, SHAPES, STEPS

import jaxcomp

BAD = 5  # the step that is not finite
RUNS = [
    *((mapping, "float32", False) for mapping in (*MAPPINGS, "explicit")),
    *(("vmap", dtype, False) for dtype in ("bfloat16", "float16")),
    ("vmap", "float32", True),
]


def gradients(dtype: str, bad: bool) -> dict[str, Any]:
    """Trees ``(replicas, steps, *shape)`` around a mean that all have in common."""
    rng = np.random.default_rng(3)
    drawn = {
        name: rng.normal(size=shape) + rng.normal(size=(REPLICAS, STEPS, *shape))
        for name, shape in SHAPES.items()
    }
    if bad:
        drawn["dense"][1, BAD, 2, 3] = np.inf
    return {name: jnp.asarray(x, dtype) for name, x in drawn.items()}


def beside_an_explicit_axis(tx: Any, grads: Any) -> Any:
    """As `simulate` under shard_map, on a mesh with an Explicit axis beside the replicas'."""
    kinds = (AxisType.Explicit, AxisType.Explicit)
    mesh = jax.make_mesh((REPLICAS, 2), (AXIS, "other"), axis_types=kinds)
    outputs = []
    with jax.set_mesh(mesh):
        state = tx.init({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        specs = jaxcomp.state_specs(state, AXIS)
        update = lambda g, state: tx.update(first(g), state)  # noqa: E731
        own = jax.P(AXIS), specs
        step = sharded(mesh, update, own, (jax.P(), specs), axis_names={AXIS})
        state = jaxcomp.shard_state(state, mesh, AXIS)
        for t in range(STEPS):
            one = jax.tree.map(lambda x, t=t: x[:, t], grads)
            one = jax.device_put(one, jax.NamedSharding(mesh, jax.P(AXIS)))
            output, state = step(one, state)
            outputs.append(output)
    return jax.tree.map(lambda *x: np.stack(x), *outputs), state


def record(path: str, runs: list[Any]) -> None:
    """Writes all values of each run, outputs of every step and the state after the last."""
    found = {}
    for name, tx in CASES.items():
        for mapping, dtype, bad in runs:
            grads = gradients(dtype, bad)
            explicit = mapping == "explicit"
            both = beside_an_explicit_axis(tx, grads) if explicit else simulate(mapping, tx, grads)
            values = [np.asarray(x, np.float32).reshape(-1) for x in jax.tree.leaves(both)]
            found[f"{name}, {mapping}, {dtype}{', not finite' * bad}"] = np.concatenate(values)
        print(name, flush=True)
    np.savez_compressed(path, **found)


def compare(before: str, after: str) -> None:
    """Prints how many runs are equal bit for bit, and how far the others are off."""
    old, new = np.load(before), np.load(after)
    equal = [name for name in old.files if np.array_equal(old[name], new[name], equal_nan=True)]
    print(f"{len(equal)} of {len(old.files)} equal bit for bit")
    for name in [name for name in old.files if name not in equal]:
        a, b = old[name], new[name]
        off = "another number of values, or of NaN"
        if a.shape == b.shape and np.array_equal(np.isnan(a), np.isnan(b)):
            off = f"{np.nanmax(np.abs(a - b)) / np.nanmax(np.abs(a)):.1e} of the largest value"
        print(f"{name}: {off}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--quick", action="store_true", help="float32 under vmap only")
    given = parser.parse_args()
    if given.compare:
        compare(*given.paths)
    else:
        record(given.paths[0], RUNS[:1] if given.quick else RUNS)
