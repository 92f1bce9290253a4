"""collectives reads what XLA wrote; check refuses what a reducer should have saved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomp
from tests.helpers import autoencoder, hlo
from tests.helpers.autoencoder import LAYOUTS, loss, new_params
from tests.helpers.classifier import grid, placed
from tests.helpers.runners import mesh_of, sharded

P = jax.P


parameters = functools.partial(autoencoder.parameters, width=256)
X = np.ones((8, 256), np.float32)


def compiled(step, *arguments):
    return jax.jit(step).lower(*arguments).compile()


SMALL = jax.sharding.AbstractMesh((2, 2), ("x", "y"))
LARGE = jax.sharding.AbstractMesh((2, 2, 2), ("a", "b", "c"))
FORMS = {
    "replica_groups={{0,4},{1,5}}, to_apply=%add": (LARGE, "a"),
    "source_target_pairs={{0,1},{1,0}}": (LARGE, "c"),
    "replica_groups=[2,2]<=[2,2]T(1,0), channel": (SMALL, "x"),
    "replica_groups=[2,2]<=[2,2], channel": (SMALL, "y"),
    "replica_groups=mesh['slow'=2,'fast'=2] {'slow'}, use": (SMALL, "x"),
    "replica_groups=mesh['s'=2,'t'=2,'u'=2] {'s','u'}, use": (LARGE, "ac"),
    # The devices 0 2 1 3 in a row, cut in two columns.
    "replica_groups=mesh['s'=2,'t'=2], device_ids=([2,2]T(1,0)) {'s'}, use": (SMALL, "y"),
    "channel_id=1, replica_groups={}, to_apply=%add": (SMALL, "xy"),
}


def of_line(form, mesh):
    line = f"ROOT %r = f32[8]{{0}} all-reduce(%p), {form}"
    entry = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  {line}\n}}"
    (found,) = hlo.read(f"HloModule m, num_partitions={mesh.size}\n\n{entry}\n", mesh)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_replica_groups_are_read_in_every_form(form):
    mesh, axes = FORMS[form]
    assert of_line(form, mesh).axes == tuple(axes)


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match=r"form unknown here: .*replica_groups=ring"):
        of_line("replica_groups=ring", SMALL)


def test_bytes_of_asynchronous_and_merged_collectives_and_where_they_run():
    text = """HloModule m, num_partitions=4

%body (p: (f32[8])) -> (f32[8]) {
  %a = (f32[8]{0}, bf16[2,3]{1,0}) all-reduce(%x, /*index=1*/%y), replica_groups={{0,1,2,3}}
}

%second (p: f32[8]) -> f32[8] {
  %g = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}
  %d = f32[8]{0} all-gather-done(%g)
}

%first (p: f32[8]) -> f32[8] {
  ROOT %s = f32[8]{0} copy(%p)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w = (f32[8]) while(%t), body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %c = f32[8]{0} conditional(%i, %p, %p), branch_computations={%first, %second}
  ROOT %r = s8[4]{0} all-reduce-start(%c), replica_groups={{0,1,2,3}}, metadata={op_name="f/psum"}
}
"""
    loop, branch, last = hlo.read(text)
    assert loop.arrays == (("f32", 8), ("bf16", 6))
    assert [(x.in_loop, x.times) for x in (loop, branch, last)] == [
        (True, 3),
        (False, 1),
        (False, 1),
    ]
    assert branch.arrays == (("f32", 8),)
    assert [x.in_branch for x in (loop, branch, last)] == [False, True, False]
    assert [x.bytes for x in (loop, branch, last)] == [44, 32, 4]
    assert last.operation == "f/psum"


def test_every_collective_with_its_axes():
    kinds = {"axis_types": (AxisType.Auto,) * 2, "devices": jax.devices()[:8]}
    mesh = jax.make_mesh((2, 4), ("slow", "fast"), **kinds)

    def step(x):
        rows = jax.lax.all_gather(jax.lax.psum(x, "slow"), "fast")
        both = jax.lax.psum(x, ("slow", "fast"))
        return rows.sum(0) + both + jax.lax.ppermute(x, "fast", [(0, 1), (1, 0), (2, 2), (3, 3)])

    spec = P(("slow", "fast"))
    run = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = placed(mesh, np.ones((8, 50), np.float32), spec)
    program = compiled(run, x)
    found = jaxcomp.collectives(program)
    listed = [y for x in found for y in hlo.results(x)]
    assert sorted(listed) == sorted(hlo.collectives(program.as_text()))
    by_kind = {(x.kind, x.axes): x for x in found}
    assert by_kind["all-reduce", ("slow",)].bytes == 200
    assert by_kind["all-reduce", ("slow", "fast")].bytes == 200
    gathered = by_kind["all-gather", ("fast",)]
    assert (gathered.bytes, gathered.as_all_reduce) == (800, 400)
    assert by_kind["collective-permute", ("fast",)].bytes == 200
    assert str(gathered).startswith("all-gather of 800 bytes of f32 over ('fast',), for jit(")
    with pytest.raises(ValueError, match=r"jax.jit\(step\).lower"):
        jaxcomp.collectives(jax.jit(step))


POWERSGD = functools.partial(jaxcomp.powersgd, axis_name="data")
REDUCERS = {
    "now": POWERSGD(1, start_step=0),
    "later": POWERSGD(1, start_step=5),
    "int8": POWERSGD(4, start_step=0, comm_dtype=jnp.int8),
    "int6 later": POWERSGD(4, start_step=5, comm_dtype="int6"),
    "quantized": jaxcomp.quantized_allreduce(axis_name="data"),
    "allreduce": jaxcomp.allreduce(axis_name="data"),
    # Of which XLA's CPU backend makes float32; a rehearsal there is not two reducers.
    "bfloat16": jaxcomp.allreduce(axis_name="data", comm_dtype=jnp.bfloat16),
    "factors in bfloat16": POWERSGD(1, start_step=0, comm_dtype=jnp.bfloat16),
}
TOO_MUCH = r"sends [\d,]+ bytes over data, where .* besides are allowed \(allow=\)"


def checked(reducer, mesh, params, x, like=None):
    """A right step, which passes."""
    run = jaxcomp.value_and_grad(loss, reducer, mesh=mesh)
    program = compiled(run, run.init(params), params, x)
    listed = [y for x in jaxcomp.check(program, reducer, like or params) for y in hlo.results(x)]
    assert sorted(listed) == sorted(hlo.collectives(program.as_text()))
    return run


# Of factors of integers a step beside another axis shows what passes, below.
@pytest.mark.parametrize("name", [name for name in REDUCERS if not name.startswith("int")])
def test_what_a_reducer_sends_passes_and_twice_as_much_does_not(name):
    mesh, reducer = mesh_of(4), REDUCERS[name]
    params = parameters(mesh)
    checked(reducer, mesh, params, X)
    again = optax.chain(reducer, optax.stateless(lambda g, p: jaxcomp.as_local(g, "data")), reducer)
    run = jaxcomp.value_and_grad(loss, again, mesh=mesh, axis_name="data")
    with pytest.raises(ValueError, match=TOO_MUCH):
        jaxcomp.check(compiled(run, run.init(params), params, X), reducer, params)


# Factors of integers take longest to compile: once in every step and once in a branch.
BESIDE = [(name, layout) for name in ("later", "quantized", "bfloat16") for layout in LAYOUTS]
BESIDE += [("int8", "fsdp"), ("int6 later", "tensor")]


@pytest.mark.parametrize(("name", "layout"), BESIDE)
def test_a_right_step_passes_beside_another_axis(name, layout):
    mesh = grid(2, model=2)
    checked(REDUCERS[name], mesh, parameters(mesh, layout), X)


def narrow(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


# Of how much each reducer may send, twice as much shows it, above; of the layouts a pmean.
@pytest.mark.parametrize(
    ("name", "layout", "cast"),
    [
        *(("now", layout, lambda tree: tree) for layout in LAYOUTS),
        *((name, "fsdp", narrow) for name in ("allreduce", "bfloat16")),
    ],
)
def test_a_pmean_beside_another_axis_is_refused(name, layout, cast):
    mesh, reducer = grid(2, model=2), REDUCERS[name]
    params, x = cast((parameters(mesh, layout), X))
    run = checked(reducer, mesh, params, x)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}
    )
    def pmean(params, x):
        grads = jax.grad(loss)(jaxcomp.as_local(params, "data"), x)
        # XLA's CPU backend aborts at a bfloat16 all-reduce beside an automatic axis.
        return jax.lax.pmean(jax.tree.map(lambda g: g.astype(jnp.float32), grads), "data")

    def both(state, params, x):
        return run(state, params, x), pmean(params, x)

    with pytest.raises(ValueError, match=TOO_MUCH):
        jaxcomp.check(compiled(both, run.init(params), params, x), reducer, params)


def test_shapes_alone_do_beside_explicit_axes_too():
    mesh = grid(2, "explicit", model=2)
    checked(
        REDUCERS["now"], mesh, parameters(mesh), X, like=jax.eval_shape(lambda: new_params(256))
    )


@pytest.mark.parametrize(("name", "behind"), [("now", False), ("later", False), ("now", True)])
def test_what_is_averaged_before_the_reducer_is_refused(name, behind):
    """By a pmean within the step, or by the compiler, in a jit loop as it was."""
    mesh, reducer = mesh_of(4), REDUCERS[name]
    params, x = parameters(mesh), placed(mesh, X, P("data"))
    state = jaxcomp.shard_state(reducer.init(params), mesh, "data")
    specs = jaxcomp.state_specs(state, "data")

    def update(grads, state):
        return reducer.update(jaxcomp.as_local(grads, "data"), state)

    def left_in(params, state, x):
        grads = jaxcomp.local_value_and_grad(loss, "data")(params, x)[1]
        return update(jax.lax.pmean(grads, "data"), state)

    step = sharded(mesh, left_in, (P(), specs, P("data")), (P(), specs))
    if behind:
        mapped = sharded(mesh, update, (P(), specs), (P(), specs))
        step = lambda params, state, x: mapped(jax.grad(loss)(params, x), state)  # noqa: E731
    with pytest.raises(ValueError, match=TOO_MUCH) as error:
        jaxcomp.check(compiled(step, params, state, x), reducer, params)
    assert "\n  all-reduce of 1,050,624 bytes of f32 over ('data',), for jit(" in str(error.value)


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
    """The reducer of each of three micro-batches sends three times what one does."""
    mesh, reducer = mesh_of(4), REDUCERS["now"]
    params = parameters(mesh)
    run = jaxcomp.value_and_grad(loss, reducer, mesh=mesh)
    state = run.init(params)

    def three(state, params, x):
        return jax.lax.scan(lambda s, _: run(s, params, x)[::-1], state, length=3)

    with pytest.raises(ValueError, match=r", in a loop \(3 times\)"):
        jaxcomp.check(compiled(three, state, params, X), reducer, params)


def test_a_step_without_its_reducer_is_refused():
    mesh = mesh_of(4)
    params, x = parameters(mesh), placed(mesh, X, P("data"))
    local = compiled(lambda params, x: jnp.tanh(x @ params["up"]), params, x)
    with pytest.raises(ValueError, match=r"sends 0 bytes over data, where powersgd\(.*\) sends "):
        jaxcomp.check(local, REDUCERS["now"], params)
    with pytest.raises(ValueError, match=r"`reducer` must be a jaxcomp reducer, got Gradient"):
        jaxcomp.check(local, optax.chain(REDUCERS["now"]), params)
