"""What a reducer says that it sends is what the compiled program sends; how it shows itself."""

import functools
import importlib.metadata
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxcomp
from tests.helpers import hlo
from tests.helpers.hlo import collectives, sent_bytes
from tests.helpers.reducers import REDUCERS, allreduce, batched, powersgd, quantized, reducer
from tests.helpers.runners import AXIS, lower_update, mesh_of, sharded
from tests.helpers.xla import users_program

P = jax.P
REPLICAS = 4
PARAMS = {"bias": jnp.zeros(24), "kernel": jnp.zeros((24, 16)), "wide": jnp.zeros((16, 40))}
HALF = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS)
POWERSGD = powersgd(2)
SGD = optax.sgd(0.1)
local_sgd = functools.partial(jaxcomp.local_sgd, axis_name=AXIS)
# With a stack of matrices, and with leaves that go along in their own dtypes.
MIXED = PARAMS | {
    "empty": jnp.zeros((0, 3)),
    "half": jnp.zeros(5, jnp.bfloat16),
    "layers": jnp.zeros((3, 16, 24)),
    "scalar": jnp.zeros(()),
    "wide again": jnp.zeros((16, 40)),
}
# docs/compatibility.md: no program of this jaxlib's may have an empty array beside another.
if importlib.metadata.version("jaxlib").startswith("0.11."):
    del MIXED["empty"]
# XLA's CPU backend sends bfloat16 as float32; what a user's own reducer sends, we do not know.
COUNTED = [name for name in REDUCERS if name != "allreduce-bf16" and "own" not in name]
# A transformation, parameters, and steps that together take every branch of the program once.
CASES = {name: (reducer(name), PARAMS, [None]) for name in COUNTED}
CASES |= {
    "powersgd-late": (reducer("powersgd-late"), PARAMS, [1, 2]),
    "allreduce of halves": (allreduce(), HALF, [None]),
    "powersgd of halves": (POWERSGD, HALF, [None]),
    "nothing to send": (POWERSGD, {"none": None, "empty": jnp.zeros((8, 0))}, [None]),
    "int8 factors later": (powersgd(2, start_step=1, comm_dtype=jnp.int8), PARAMS, [0, None]),
    "int6 factors": (
        powersgd(3, comm_dtype="int6", matrix_dims=jaxcomp.stacked("layers")),
        MIXED,
        [None],
    ),
    "batched later": (batched(2, start_step=1), PARAMS, [0, 1]),
    "local": (local_sgd(SGD, sync_every=3), PARAMS, [1, 2]),
    "local of low rank": (local_sgd(SGD, sync_every=8, reducer=POWERSGD), PARAMS, range(8)),
    "local with momenta": (
        local_sgd(optax.sgd(0.1, momentum=0.9), sync_every=3, average_inner_state=True),
        PARAMS,
        [1, 2],
    ),
    "post-local": (
        local_sgd(SGD, sync_every=2, start_step=4, reducer=POWERSGD, outer=optax.sgd(0.7)),
        PARAMS,
        [3, 5],  # the last shared step averages the parameters, too; then pseudo-gradients
    ),
    "local micro-batches": (
        local_sgd(optax.MultiSteps(SGD, 2), sync_every=4),  # which counts micro-batches
        PARAMS,
        [2, 3],
    ),
    "accumulate": (jaxcomp.accumulate(local_sgd(SGD, sync_every=2), 2), PARAMS, [0, 1, 2, 3]),
    "accumulate low rank": (jaxcomp.accumulate(POWERSGD, 2), PARAMS, [0, 1]),
}


@functools.cache
def compiled(name):
    tx, params, _ = CASES[name]

    def update(*arguments):
        return tx.update(*arguments)[0]

    mapped = sharded(REPLICAS, update, (P(), P(), P()), P(), check_vma=False)
    with jax.numpy_dtype_promotion("standard"):  # for MultiSteps
        return hlo.program(mapped, params, tx.init(params), params)


def program(name):
    return compiled(name).as_text()


def on_the_wire(name):
    """Counts the bytes that a replica hands to the collectives, over all branches."""
    # Of an all-to-all and an all-gather, which carry as much, one counts.
    return sent_bytes([one for one in collectives(program(name)) if one[0] != "all-gather"])


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_those_of_the_compiled_program(name):
    tx, params, steps = CASES[name]
    stats = [tx.bytes(params, replicas=REPLICAS, step=step) for step in steps]
    assert sum(one.bytes_after for one in stats) == on_the_wire(name)
    for one in stats:
        assert one.bytes_after == sum(leaf.bytes_after for leaf in one.leaves)
        assert one.bytes_before == sum(x.nbytes for x in jax.tree.leaves(params))


@pytest.mark.parametrize("name", [name for name in CASES if "local" in name or "accum" in name])
def test_of_local_steps_every_collective_stands_in_a_branch(name):
    listed = jaxcomp.collectives(compiled(name), mesh=mesh_of(REPLICAS))
    assert all(collective.in_branch for collective in listed)


def transformer(layers, width=16):
    layer = {
        "attention": {"qkv": (width, 3, 4, width // 4), "out": (4, width // 4, width)},
        "mlp": {"up": (width, 4 * width), "bias": (4 * width,), "down": (4 * width, width)},
        "norm": {"scale": (width,), "bias": (width,)},
    }
    tree = {f"layer_{i}": layer for i in range(layers)}
    tree["embed"] = {"embedding": (256, width)}
    return jax.tree.map(jnp.zeros, tree, is_leaf=lambda x: isinstance(x, tuple))


def test_a_24_layer_model_takes_two_all_reduces_and_the_promised_bytes():
    params = transformer(24)
    rank = 2
    tx = jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0)
    text = lower_update(tx, params, 8).compile().as_text()
    found = collectives(text)
    assert [op for op, _, _ in found] == ["all-reduce", "all-reduce"]
    assert "conditional" not in text  # start_step=0 leaves no warm-up branch
    # Counted by hand: every matrix passes the test, out (16, 16) just so: 32 * 2 * 2 < 256.
    layer = rank * (16 + 48) + rank * (16 + 16) + 2 * rank * (16 + 64) + (64 + 16 + 16)
    by_hand = 4 * (24 * layer + rank * (256 + 16))
    assert sent_bytes(found) == by_hand == tx.bytes(params).bytes_after


def test_compiling_quickly_changes_no_collective_and_no_memory():
    """So that other tests may read the wire of programs that took a quarter of the time."""
    lowered = lower_update(reducer("powersgd-late"), transformer(1), 8)
    quick = lowered.compile()
    users = users_program(lowered)
    assert collectives(quick.as_text()) == collectives(users.as_text())
    memory = [x.memory_analysis().temp_size_in_bytes for x in (quick, users)]
    # Of small buffers some are laid out otherwise.
    assert memory[0] == pytest.approx(memory[1], rel=1e-2)


def test_bfloat16_is_on_the_wire_of_every_backend_that_has_it():
    """Reads the program that is lowered for a GPU: the CPU has none."""
    params = transformer(1)
    tx = powersgd(2, comm_dtype=jnp.bfloat16)
    text = lower_update(tx, params, 8, platforms=("cuda",)).as_text()
    types = re.findall(r"stablehlo\.all_reduce.*?\}\)(.*?)\n", text, re.S)
    assert len(types) == 2
    assert all("bf16>" in signature for signature in types), types


@pytest.mark.parametrize(("name", "averages"), [("int8", 1), ("int6 factors", 2)])
def test_all_integers_of_an_average_take_one_all_to_all_and_one_all_gather(name, averages):
    found = collectives(program(name))
    assert {(op, kind) for op, kind, _ in found} == {("all-to-all", "s8"), ("all-gather", "s8")}
    # Which may be listed as one result for each replica.
    assert program(name).count(" all-to-all(") == averages
    assert program(name).count(" all-gather(") == averages
    assert sent_bytes(found) == 2 * on_the_wire(name)


def test_without_a_step_it_is_the_mean_after_all_exact_steps():
    dense = sum(x.nbytes for x in jax.tree.leaves(PARAMS))
    late = powersgd(2, start_step=100)
    assert late.bytes(PARAMS).bytes_after == POWERSGD.bytes(PARAMS).bytes_after < dense
    assert late.bytes(PARAMS, step=99).bytes_after == dense
    local = local_sgd(SGD, sync_every=8, start_step=10)
    levels = local_sgd(SGD, sync_every={"x": 4, ("x", "y"): 16}, axis_name=("x", "y"))
    rounds = jaxcomp.local_sgd_round(print, sync_every=4, axis_name=AXIS)
    for tx, every in ((local, 8), (jaxcomp.accumulate(local, 2), 16), (levels, 4), (rounds, 4)):
        assert tx.bytes(PARAMS).bytes_after == dense // every
    assert [rounds.bytes(PARAMS, step=k).bytes_after for k in (2, 3)] == [0, dense]


RUNS = {
    "exact": allreduce(),
    "exact first": powersgd(2, start_step=5),
    "feedback": jaxcomp.error_feedback(powersgd(2, start_step=5, error_feedback=False)),
    "local": local_sgd(SGD, sync_every=4, start_step=5, outer=optax.sgd(0.7)),
    "schedule": local_sgd(SGD, sync_every=lambda last: 2 + last // 2),
    "micro-batches": jaxcomp.accumulate(powersgd(2, start_step=5), 3),
    "rounds": jaxcomp.local_sgd_round(
        print, sync_every=4, axis_name=AXIS, reducer=powersgd(2, start_step=2)
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_whole_run_is_the_sum_of_its_steps(name):
    tx = RUNS[name]
    dense = sum(x.nbytes for x in jax.tree.leaves(PARAMS))
    for steps in (1, 4, 6, 23):
        run = tx.bytes(PARAMS, steps=steps)
        each = [tx.bytes(PARAMS, step=step).bytes_after for step in range(steps)]
        assert run.bytes_after == sum(each) == sum(leaf.bytes_after for leaf in run.leaves)
        assert run.bytes_before == steps * dense
    if isinstance(tx, jaxcomp.Reducer):  # phases are found without a walk through all steps
        tx.bytes(PARAMS, steps=10**12)


def test_the_bytes_of_a_long_run_are_counted_without_a_compilation(caplog):
    tx = local_sgd(SGD, sync_every=4, start_step=2)
    with jax.log_compiles():
        tx.bytes(PARAMS, steps=37)
    assert "Compiling" not in caplog.text


def test_a_schedule_is_followed_step_by_step():
    synced = [step for step in range(12) if RUNS["schedule"].bytes(PARAMS, step=step).bytes_after]
    assert synced == [1, 4, 8]  # rounds of 2, 3 and 4 steps


def test_stats_read_well_and_follow_the_arguments():
    params = {"w": jnp.zeros((64, 32), jnp.bfloat16), "b": jnp.zeros(32, jnp.bfloat16)}
    tx = jaxcomp.powersgd(2, axis_name=AXIS)
    stats = tx.bytes(params)
    assert stats.ratio == pytest.approx(stats.bytes_before / stats.bytes_after)
    bias, weight = stats.leaves
    assert weight.path == "['w']"
    assert (weight.rank, bias.rank) == (2, 0)
    assert weight.compressed
    assert not bias.compressed
    assert "['w']" in str(stats)
    assert tx.bytes(jax.eval_shape(lambda: params)) == stats
    assert tx.bytes({}).ratio == 1.0
    none = jaxcomp.powersgd(lambda path, leaf: None, axis_name=AXIS, comm_dtype=np.float32)
    assert none.bytes(params).bytes_after == 4 * (64 * 32 + 32)


OWN = jaxcomp.Reducer(lambda params: (), lambda *args: None, AXIS)


class Normed(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(24, 16, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))


ADAM = optax.adam(1e-3)
NO_PARAMETERS = {
    "an optimizer's state": (ADAM.init(PARAMS), r"\[0\] is of type ScaleByAdamState"),
    "a chain's": (optax.chain(POWERSGD, SGD).init(PARAMS), r"\[0\] is of type PowerSGDState"),
    "a state without arrays": (optax.sgd(0.1).init(PARAMS), r"\[0\] is of type EmptyState"),
    "an optimizer": ((ADAM, PARAMS), r"\[0\] is of type GradientTransformation"),
    "a TrainState": (
        TrainState.create(apply_fn=None, params=PARAMS, tx=ADAM),
        r"\(root\) is of type TrainState\. Pass state.params",
    ),
    "nnx's optimizer": (
        nnx.Optimizer(Normed(), ADAM, wrt=nnx.Param),
        r"\(root\) is of type Optimizer",
    ),
    "a module with statistics": (Normed(), r"\.norm\.mean is of type BatchStat"),
    "variables of linen": (
        {"model": {"params": PARAMS, "batch_stats": {"mean": jnp.zeros(3)}}},
        r"\['model'\] is of type dict of .*'batch_stats'",
    ),
}
LINK = {"workers": 2, "bandwidth": "1Gbit", "step_time": "20ms"}
TAKES_PARAMETERS = {
    "params": [
        POWERSGD.bytes,
        allreduce().bytes,
        POWERSGD.init,
        jaxcomp.value_and_grad(jnp.sum, POWERSGD, mesh=mesh_of(2)).init,
        functools.partial(jaxcomp.advise, **LINK),
        jaxcomp.measure,
    ],
    "gradients": [functools.partial(jaxcomp.ranks_by_spectrum, ratio=2)],
}


@pytest.mark.parametrize(("tree", "message"), NO_PARAMETERS.values(), ids=NO_PARAMETERS)
def test_what_holds_more_than_parameters_is_not_counted(tree, message):
    for name, functions in TAKES_PARAMETERS.items():
        for function in functions:
            with pytest.raises(ValueError, match=f"`{name}` must be a tree of par.*{message}"):
                function(tree)


def test_a_number_of_parameters_is_for_the_adviser_only():
    with pytest.raises(ValueError, match=r"and \(root\) is of type int"):
        POWERSGD.bytes(124_000_000)
    by_number = jaxcomp.advise(124e6, **LINK)
    assert str(by_number) == str(jaxcomp.advise("124M", **LINK))
    for nothing in (None, {}, {"count": jnp.zeros(3, jnp.int32)}):
        with pytest.raises(ValueError, match="`params` holds no floating array"):
            jaxcomp.advise(nothing, **LINK)


def test_parameters_alone_are_counted_in_any_container():
    counted = POWERSGD.bytes(nnx.state(Normed(), nnx.Param))
    assert not any("mean" in leaf.path for leaf in counted.leaves)
    wrapped = optax.contrib.split_real_and_imaginary(POWERSGD)
    assert wrapped.init({"w": jnp.zeros((24, 16), jnp.complex64)})
    assert POWERSGD.bytes(ADAM.init(PARAMS)[0].mu) == POWERSGD.bytes(PARAMS)


@pytest.mark.parametrize(
    ("tx", "options", "message"),
    [
        (quantized(), {}, "`replicas` is missing"),
        (POWERSGD, {"step": -1}, "`step` must be a non-negative integer"),
        (POWERSGD, {"steps": 0}, "`steps` must be a positive integer"),
        (POWERSGD, {"step": 1, "steps": 2}, "`step` for one step or `steps` for a whole run"),
        (OWN, {}, r"Reducer\(axis_name='data'\) does not know"),
        (jaxcomp.error_feedback(OWN), {}, r"Reducer\(axis_name='data'\) does not know"),
        (jaxcomp.accumulate(optax.chain(POWERSGD, SGD), 2), {}, "Call bytes of the reducer in it"),
        (RUNS["schedule"], {}, "Pass `step`"),
    ],
)
def test_what_cannot_be_counted_is_said(tx, options, message):
    with pytest.raises(ValueError, match=message):
        tx.bytes(PARAMS, **options)


def test_a_transformation_shows_the_arguments_it_was_made_with():
    inner = jaxcomp.powersgd(rank=4, axis_name=AXIS, comm_dtype=jnp.bfloat16, error_feedback=False)
    tx = jaxcomp.error_feedback(inner)
    assert "powersgd(rank=4, axis_name='data', start_step=1000, " in repr(tx)
    assert "comm_dtype=bfloat16" in repr(tx)
    assert repr(tx).startswith("error_feedback(reducer=powersgd(")
    run = jaxcomp.local_sgd_round(print, sync_every=2, axis_name=AXIS, reducer=tx)
    assert repr(run).startswith("local_sgd_round(step_fn=print, sync_every=2, axis_name=")
    assert repr(tx) in repr(run)
