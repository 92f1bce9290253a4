"""Records what each reducer gives, to be compared after a change: outputs, residuals and factors.

python tests/support/record.py out.npz [--quick]    before and after, on one machine
python tests/support/record.py --compare before.npz after.npz

`tests/jaxcomp/reducers/data/recorded.npz` has outputs of commit d55f995, before the step was
written anew: `test_recorded.py` compares with them.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxcomp

AXIS, REPLICAS, STEPS = "data", 4, 10
SHAPES = {
    "bias": (16,),
    "conv": (3, 3, 4, 12),
    "dense": (24, 16),
    "embedding": (40, 10),
    "same": (24, 16),
    "stack": (3, 12, 10),
}


def power(rank: Any = 4, **options: Any) -> Any:
    options = {"start_step": 0, "min_compression_rate": 1.0, **options}
    return jaxcomp.powersgd(rank, axis_name=AXIS, **options)


def by_layer(path: Any, leaf: Any) -> Any:
    if len(leaf.shape) == 3:
        return jaxcomp.MatrixDims(batch=(0,), rows=(2,), cols=(1,))
    return jaxcomp.extend.default_matrix_dims(path, leaf)


def cases() -> dict[str, Any]:
    feedback, plain, int8 = jaxcomp.error_feedback, jaxcomp.allreduce, jaxcomp.quantized_allreduce
    found = {
        "default": power(),
        "rank 1": power(1),
        "rank 2 eps": power(2, eps=1e-3),
        "rank 1 eps": power(1, eps=0.1),
        "start 3": power(start_step=3),
        "cold": power(warm_start=False),
        "cold start 3": power(2, warm_start=False, start_step=3),
        "no feedback": power(error_feedback=False),
        "bfloat16": power(comm_dtype=jnp.bfloat16),
        "float16": power(comm_dtype=jnp.float16),
        "float32": power(comm_dtype=jnp.float32, start_step=2),
        "int8": power(comm_dtype=jnp.int8),
        "int6": power(comm_dtype="int6"),
        "int8 start 3": power(comm_dtype=jnp.int8, start_step=3),
        "int6 cold": power(comm_dtype="int6", warm_start=False, error_feedback=False),
        "residual bfloat16": power(residual_dtype=jnp.bfloat16),
        "rank by leaf": power(lambda path, leaf: 2 if len(leaf.shape) == 2 else None),
        "by layer": power(3, matrix_dims=by_layer),
        "rate 4": power(1, min_compression_rate=4.0),
        "seed 7": power(3, seed=7),
        "full rank": power(64, min_compression_rate=0.1),
        "allreduce": plain(axis_name=AXIS),
        "allreduce bfloat16": plain(axis_name=AXIS, comm_dtype=jnp.bfloat16),
        "allreduce float16": plain(axis_name=AXIS, comm_dtype=jnp.float16),
        "quantized": int8(axis_name=AXIS),
        "quantized one scale": int8(axis_name=AXIS, block_size=None),
        "feedback quantized": feedback(int8(axis_name=AXIS)),
        "feedback float16": feedback(plain(axis_name=AXIS, comm_dtype=jnp.float16)),
        "batched": jaxcomp.batched_powersgd(2, axis_name=AXIS, start_step=0),
        "batched start 2": jaxcomp.batched_powersgd(4, axis_name=AXIS, start_step=2),
    }
    sent = power(error_feedback=False)
    found["decay"] = feedback(sent, decay=0.9)
    found["every 2"] = feedback(sent, every=2)
    halves: Any = {"axis_name": AXIS, "min_compression_rate": 1.0}
    found["acp"] = jaxcomp.acp_sgd(4, start_step=0, **halves)
    found["acp start 2 int8"] = jaxcomp.acp_sgd(4, start_step=2, comm_dtype=jnp.int8, **halves)
    return found


def gradients(dtype: Any) -> list[Any]:
    rng = np.random.default_rng(3)
    common = {k: rng.normal(size=s) for k, s in SHAPES.items()}
    return [
        {
            k: jnp.asarray(common[k] + rng.normal(size=(REPLICAS, *s)), dtype)
            for k, s in SHAPES.items()
        }
        for _ in range(STEPS)
    ]


def values_of(outputs: Any, state: Any) -> list[np.ndarray]:
    """Outputs, then residuals ``(n, ...)`` and factors, in flattening order; float32."""
    found = []
    for node in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "residual")):
        if hasattr(node, "residual"):
            found += jax.tree.leaves(node.residual)
            found += jax.tree.leaves(getattr(node, "q", ()))
    return [np.asarray(x, np.float32) for x in [*jax.tree.leaves(outputs), *found]]


def run(tx: Any, dtype: Any, mapping: str, bad: int | None) -> list[list[np.ndarray]]:
    grads = gradients(dtype)
    if bad is not None:
        grads[bad]["dense"] = grads[bad]["dense"].at[1, 2, 3].set(jnp.inf)
    state = tx.init(jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), grads[0]))
    if mapping in ("vmap", "pmap"):
        axes = jaxcomp.state_axes(state)
        state = jaxcomp.stack_replicas(state, REPLICAS)
        how = {"in_axes": (0, axes), "out_axes": (None, axes), "axis_name": AXIS}
        if mapping == "vmap":
            step = jax.jit(jax.vmap(tx.update, **how))
        else:
            step = jax.pmap(tx.update, devices=jax.devices()[:REPLICAS], **how)
        results = []
        for g in grads:
            out, state = step(g, state)
            results.append(values_of(out, state))
        return results
    kind = AxisType.Auto if mapping == "auto" else AxisType.Explicit
    mesh = jax.make_mesh((REPLICAS, 2), (AXIS, "other"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        specs = jaxcomp.state_specs(state, AXIS)
        state = jaxcomp.shard_state(state, mesh, AXIS)

        def local(g: Any, state: Any) -> Any:
            return tx.update(jax.tree.map(lambda x: x[0], g), state)

        step = jax.jit(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(jax.P(AXIS), specs),
                out_specs=(jax.P(), specs),
                axis_names={AXIS} if mapping == "explicit" else {AXIS, "other"},
            )
        )
        results = []
        for g in grads:
            g = jax.device_put(g, jax.NamedSharding(mesh, jax.P(AXIS)))
            out, state = step(g, state)
            results.append(values_of(out, state))
        return results


def record(path: str, quick: bool) -> None:
    found = {}
    for name, tx in cases().items():
        plans = [("float32", m, None) for m in ("vmap", "pmap", "auto", "explicit")]
        plans += [(kind, "vmap", None) for kind in ("bfloat16", "float16")]
        plans += [("float32", "vmap", 5)]
        for dtype, mapping, bad in plans[:1] if quick else plans:
            key = f"{name}|{dtype}|{mapping}|{bad}"
            try:
                steps = run(tx, dtype, mapping, bad)
            except Exception as error:
                print(key, "FAILED", str(error)[:300], flush=True)
                continue
            for t, values in enumerate(steps):
                flat = [x.reshape(-1) for x in values]
                found[f"{key}|{t}"] = np.concatenate(flat)
        print(name, flush=True)
    np.savez_compressed(path, **found)


def compare(before: str, after: str) -> None:
    old, new = np.load(before), np.load(after)
    worst: dict[str, tuple[float, int]] = {}
    for key in old.files:
        name, step = key.rsplit("|", 1)
        if key not in new.files:
            worst[name] = (float("nan"), int(step))
            continue
        a, b = old[key], new[key]
        if a.shape != b.shape:
            worst[name] = (float("inf"), int(step))
            continue
        same = np.array_equal(a, b, equal_nan=True)
        gap = 0.0
        if not same:
            if not np.array_equal(np.isnan(a), np.isnan(b)):
                gap = float("inf")
            else:
                gap = float(np.nanmax(np.abs(a - b)) / np.nanmax(np.abs(a)))
        if name not in worst or gap > worst[name][0]:
            worst[name] = (gap, int(step))
    equal = [name for name, (gap, _) in worst.items() if gap == 0]
    print(f"{len(equal)} of {len(worst)} equal bit for bit")
    for name, (gap, step) in worst.items():
        if gap != 0:
            print(f"{name:40} {gap:.2e} of the largest value, first or worst in step {step}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--quick", action="store_true", help="float32 under vmap only")
    given = parser.parse_args()
    if given.compare:
        compare(*given.paths)
    else:
        record(given.paths[0], given.quick)
