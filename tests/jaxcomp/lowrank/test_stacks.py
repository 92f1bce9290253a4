"""Small leaves of one shape as one leaf: the same values, bytes and starts as leaf by leaf."""

import functools
import itertools

import numpy as np

from tests.helpers import reducers
from tests.helpers.leaves import all_finite, by_layer, random_grads, zeros
from tests.helpers.runners import simulate

# Each shape three times, one of them already a stack of matrices; the order mixes them.
KINDS = {"a": (20, 24), "bias": (7,), "layers": (2, 16, 18)}
SHAPES = {f"{name}{i}": shape for i in range(3) for name, shape in KINDS.items()}
SHAPES["embedding"] = (50, 12)


powersgd = functools.partial(reducers.powersgd, 3, matrix_dims=by_layer, min_compression_rate=0.5)


def test_an_update_of_many_leaves_is_that_of_each_alone():
    grads, tx = random_grads(SHAPES, 2, 3), powersgd(start_step=1)
    together = tx.init(zeros(SHAPES))
    outputs, after = simulate("shard_map", tx, grads, together)
    for name in ("a0", "a2", "layers2"):
        alone = name[:-1]  # the same for leaves of one shape, which share a program
        first = tx.init(zeros({alone: SHAPES[name]}))._replace(q={alone: together.q[name]})
        expected, state = simulate("vmap", tx, {alone: grads[name]}, first)
        np.testing.assert_allclose(outputs[name], expected[alone], atol=2e-5)
        np.testing.assert_allclose(after.residual[name], state.residual[alone], atol=2e-2)
        np.testing.assert_allclose(after.q[name], state.q[alone], atol=2e-2)


def test_leaves_of_half_the_width_are_stacks_of_their_own():
    grads, tx = random_grads(SHAPES, 2, 2), powersgd()
    grads["a0"] = grads["a0"].astype(np.float16)
    grads["a2"] = grads["a2"].astype(np.float16)
    outputs, _ = simulate("shard_map", tx, grads)
    assert {name: x.dtype for name, x in outputs.items()} == {k: x.dtype for k, x in grads.items()}
    assert all_finite(outputs)


def test_cold_starts_differ_from_leaf_to_leaf_and_step_to_step():
    """Takes equal gradients: what a random factor finds in them tells the factors apart."""
    shapes = {name: shape for name, shape in SHAPES.items() if name.startswith("a")}
    one = random_grads({"a": (20, 24)}, 2, 1)["a"]
    grads = {name: np.repeat(one, 2, axis=1) for name in shapes}
    tx = powersgd(warm_start=False, error_feedback=False)
    outputs, _ = simulate("vmap", tx, grads)
    every = np.concatenate([outputs[name] for name in shapes])
    for one, other in itertools.combinations(every, 2):
        assert np.abs(one - other).max() > 1e-2
