"""What a reducer says that it sends is what the compiled program sends; how it shows itself."""

import copy
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from hlo import BYTES, collectives, text
from runners import AXIS, mesh_of

import jaxcomp

REPLICAS = 4
PARAMS = {"bias": jnp.zeros(24), "kernel": jnp.zeros((24, 16)), "wide": jnp.zeros((16, 40))}
HALF = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS)
POWERSGD = jaxcomp.powersgd(2, axis_name=AXIS, start_step=0)
# With a stack of matrices, and with leaves that go along in their own dtypes.
MIXED = PARAMS | {
    "empty": jnp.zeros((0, 3)),
    "half": jnp.zeros(5, jnp.bfloat16),
    "layers": jnp.zeros((3, 16, 24)),
    "scalar": jnp.zeros(()),
    "wide again": jnp.zeros((16, 40)),
}
INT8 = jaxcomp.quantized_allreduce(axis_name=AXIS)
# A transformation, parameters, and steps that together take every branch of the program once.
CASES = {
    "allreduce": (jaxcomp.allreduce(axis_name=AXIS), PARAMS, [None]),
    "allreduce of halves": (jaxcomp.allreduce(axis_name=AXIS), HALF, [None]),
    "float16": (jaxcomp.allreduce(axis_name=AXIS, comm_dtype="float16"), PARAMS, [None]),
    "int8": (INT8, PARAMS, [None]),
    "powersgd": (POWERSGD, PARAMS, [None]),
    "powersgd of halves": (POWERSGD, HALF, [None]),
    "late": (jaxcomp.powersgd(2, axis_name=AXIS, start_step=3), PARAMS, [2, 3]),
    "ACP-SGD": (
        jaxcomp.acp_sgd(2, axis_name=AXIS, start_step=0), PARAMS, [0, 1]
    ),
    "int8 factors": (
        jaxcomp.powersgd(2, axis_name=AXIS, start_step=1, comm_dtype=jnp.int8), PARAMS, [0, None]
    ),
    "int6 factors": (
        jaxcomp.powersgd(
            3, axis_name=AXIS, start_step=0, comm_dtype="int6",
            matrix_dims=jaxcomp.stacked("layers"),
        ),
        MIXED,
        [None],
    ),
    "batched": (jaxcomp.batched_powersgd(2, axis_name=AXIS, start_step=1), PARAMS, [0, 1]),
    "error feedback": (jaxcomp.error_feedback(INT8), PARAMS, [None]),
    "error feedback of halves": (
        jaxcomp.error_feedback(jaxcomp.allreduce(axis_name=AXIS)), HALF, [None]
    ),
    "local": (jaxcomp.local_sgd(optax.sgd(0.1), sync_every=3, axis_name=AXIS), PARAMS, [1, 2]),
    "local with momenta": (
        jaxcomp.local_sgd(
            optax.sgd(0.1, momentum=0.9), sync_every=3, axis_name=AXIS, average_inner_state=True
        ),
        PARAMS,
        [1, 2],
    ),
    "post-local": (
        jaxcomp.local_sgd(
            optax.sgd(0.1), sync_every=2, start_step=4, axis_name=AXIS, reducer=POWERSGD,
            outer=optax.sgd(0.7),
        ),
        PARAMS,
        [3, 5],  # the last shared step averages the parameters, too; then pseudo-gradients
    ),
    "accumulate": (
        jaxcomp.accumulate(jaxcomp.local_sgd(optax.sgd(0.1), sync_every=2, axis_name=AXIS), 2),
        PARAMS,
        [0, 1, 2, 3],
    ),
}  # fmt: skip


@functools.cache
def program(name):
    tx, params, _ = CASES[name]
    mapped = jax.shard_map(
        lambda grads, state, params: tx.update(grads, state, params)[0],
        mesh=mesh_of(REPLICAS),
        in_specs=(jax.P(), jax.P(), jax.P()),
        out_specs=jax.P(),
        check_vma=False,
    )
    return text(mapped, params, tx.init(params), params)


def on_the_wire(name):
    """Bytes that a replica hands to the collectives, over all branches of the program."""
    sent = [(op, BYTES[kind] * size) for op, kind, size in collectives(program(name))]
    # Of an all-to-all and an all-gather, which carry as much, one counts.
    return sum(size for op, size in sent if op != "all-gather")


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_those_of_the_compiled_program(name):
    tx, params, steps = CASES[name]
    stats = [tx.bytes(params, replicas=REPLICAS, step=step) for step in steps]
    assert sum(s.bytes_after for s in stats) == on_the_wire(name)
    for one in stats:
        assert one.bytes_after == sum(leaf.bytes_after for leaf in one.leaves)
        assert one.bytes_before == sum(x.nbytes for x in jax.tree.leaves(params))


@pytest.mark.parametrize(("name", "averages"), [("int8", 1), ("int6 factors", 2)])
def test_all_integers_of_an_average_take_one_all_to_all_and_one_all_gather(name, averages):
    found = collectives(program(name))
    assert {(op, kind) for op, kind, _ in found} == {("all-to-all", "s8"), ("all-gather", "s8")}
    for op in ("all-to-all", "all-gather"):  # which may be listed as one result for each replica
        assert program(name).count(f" {op}(") == averages
        assert sum(size for other, _, size in found if other == op) == on_the_wire(name)


def test_without_a_step_it_is_the_mean_after_all_exact_steps():
    dense = sum(x.nbytes for x in jax.tree.leaves(PARAMS))
    factors = POWERSGD.bytes(PARAMS).bytes_after
    late = jaxcomp.powersgd(2, axis_name=AXIS, start_step=100)
    assert late.bytes(PARAMS).bytes_after == factors < dense
    assert late.bytes(PARAMS, step=99).bytes_after == dense
    local = jaxcomp.local_sgd(optax.sgd(0.1), sync_every=8, axis_name=AXIS, start_step=10)
    assert local.bytes(PARAMS).bytes_after == dense // 8
    assert jaxcomp.accumulate(local, 2).bytes(PARAMS).bytes_after == dense // 16
    nested = jaxcomp.local_sgd(
        optax.sgd(0.1), sync_every={"x": 4, ("x", "y"): 16}, axis_name=("x", "y")
    )
    assert nested.bytes(PARAMS).bytes_after == dense // 4
    run = jaxcomp.local_sgd_round(lambda p, s, b: (p, s, None), sync_every=4, axis_name=AXIS)
    assert run.bytes(PARAMS).bytes_after == dense // 4
    assert [run.bytes(PARAMS, step=k).bytes_after for k in (2, 3)] == [0, dense]


def test_a_schedule_is_followed_step_by_step():
    tx = jaxcomp.local_sgd(optax.sgd(0.1), sync_every=lambda last: 2 + last // 2, axis_name=AXIS)
    synced = [step for step in range(12) if tx.bytes(PARAMS, step=step).bytes_after]
    assert synced == [1, 4, 8]  # rounds of 2, 3 and 4 steps
    with pytest.raises(ValueError, match="Pass `step`"):
        tx.bytes(PARAMS)


def test_what_cannot_be_counted_is_said():
    with pytest.raises(ValueError, match="`replicas` is missing"):
        INT8.bytes(PARAMS)
    with pytest.raises(ValueError, match="`step` must be a non-negative integer"):
        POWERSGD.bytes(PARAMS, step=-1)
    own = jaxcomp.Reducer(lambda params: (), lambda *args: None, AXIS)
    for tx in (own, jaxcomp.error_feedback(own)):
        with pytest.raises(ValueError, match=r"Reducer\(axis_name='data'\) does not know"):
            tx.bytes(PARAMS)
    chain = jaxcomp.accumulate(optax.chain(POWERSGD, optax.sgd(0.1)), 2)
    with pytest.raises(ValueError, match="Ask the reducer that is in it"):
        chain.bytes(PARAMS)


def test_a_transformation_shows_the_arguments_it_was_made_with():
    tx = jaxcomp.error_feedback(
        jaxcomp.powersgd(rank=4, axis_name=AXIS, comm_dtype=jnp.bfloat16, error_feedback=False)
    )
    assert "powersgd(rank=4, axis_name='data', start_step=1000, " in repr(tx)
    assert "comm_dtype=bfloat16" in repr(tx)
    assert repr(tx).startswith("error_feedback(reducer=powersgd(")
    assert repr(copy.deepcopy(tx)) == repr(tx)
    assert copy.copy(tx).bytes(PARAMS) == tx.bytes(PARAMS)
    local = jaxcomp.local_sgd(optax.sgd(0.1), sync_every=8, axis_name=AXIS, reducer=tx)
    run = jaxcomp.local_sgd_round(
        on_the_wire, sync_every=2, axis_name=AXIS, reducer=tx, fragments=["a", "b|c"]
    )
    assert repr(run).startswith("local_sgd_round(step_fn=on_the_wire, sync_every=2, axis_name=")
    assert "fragments=['a', 'b|c'], fragment_sync_delay=0, " in repr(run)
    for outer in (local, run, jaxcomp.accumulate(local, 2)):
        assert repr(tx) in repr(outer)
