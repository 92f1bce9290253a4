"""What becomes of auxiliary outputs: as said and then right, or refused; and found out."""

import functools
import re
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from numpy.testing import assert_allclose

import jaxcomp
from tests.helpers.classifier import grid, placed, stepped
from tests.helpers.leaves import close, equal, normal
from tests.helpers.reducers import reducer
from tests.helpers.runners import types_of

P = jax.P
FEATURES = 16
CLASSES = 8
EXAMPLES = 32


def data():
    params = jnp.asarray(normal(FEATURES, CLASSES))
    x = jnp.asarray(normal(EXAMPLES, FEATURES, seed=1))
    y = np.random.default_rng(2).integers(CLASSES, size=EXAMPLES)
    return params, x, jnp.asarray(y)


def per_example(params, x, y):
    logits = x @ params
    losses = jax.nn.logsumexp(logits, 1) - logits[jnp.arange(len(y)), y]
    return logits, losses


# Each kind of output, from logits, losses and labels; with the word for it, or None if there is
# none but "stack".
OUTPUTS = {
    "mean": (lambda logits, losses, y: losses.mean(), "mean"),
    "float sum": (lambda logits, losses, y: (logits.argmax(1) == y).astype("f4").sum(), "sum"),
    "count": (lambda logits, losses, y: (logits.argmax(1) != y).sum(), "sum"),
    "exp": (lambda logits, losses, y: jnp.exp(losses.mean()), None),
    "max": (lambda logits, losses, y: losses.max(), None),
    "sorted": (lambda logits, losses, y: jnp.sort(losses)[::-1], None),
    "rows": (lambda logits, losses, y: logits, "join"),
    "columns": (lambda logits, losses, y: logits.T, 1),
    "views": (lambda logits, losses, y: jnp.concatenate([logits, -logits]), None),
    "size": (lambda logits, losses, y: jnp.asarray(len(y)), "sum"),
    "float size": (lambda logits, losses, y: jnp.float32(len(y)), "sum"),
    "statistics": (lambda logits, losses, y: {"mean": logits.mean(0)}, {"mean": "mean"}),
    "complex": (lambda logits, losses, y: jax.lax.complex(logits, logits**2).mean(0), "mean"),
    "complex sum": (lambda logits, losses, y: jax.lax.complex(losses, losses**2).sum(), "sum"),
    "complex rows": (lambda logits, losses, y: jax.lax.complex(logits, logits**2), "join"),
    "variance": (lambda logits, losses, y: logits.var(0), None),
    "rounded max": (lambda logits, losses, y: losses.astype(jnp.bfloat16).max(), None),
    "key": (lambda logits, losses, y: jax.random.key(y[0]), None),
    "replica": (lambda logits, losses, y: jax.lax.axis_index("data"), None),
}
FITTING = {name: word for name, (_, word) in OUTPUTS.items() if word is not None}


def loss_with(*names):
    """Makes a loss with these outputs beside it."""

    def loss(params, x, y):
        logits, losses = per_example(params, x, y)
        aux = {name: OUTPUTS[name][0](logits, losses, y) for name in names}
        return losses.mean(), aux

    return loss


make = functools.partial(jaxcomp.value_and_grad, reducer=reducer("allreduce"), has_aux=True)


@pytest.mark.parametrize(
    ("replicas", "kind", "model"),
    [(1, "auto", 1), (4, "auto", 1), (4, "explicit", 1), (8, "auto", 1), (1, "explicit", 2)],
)
def test_what_is_said_is_as_without_replicas(replicas, kind, model):
    mesh = grid(replicas, kind, model=model)
    loss = loss_with(*FITTING)
    params, x, y = data()
    run = make(loss, mesh=mesh, aux=FITTING)
    (found, _) = stepped(run, placed(mesh, params), *placed(mesh, (x, y), P("data")))
    expected = jax.jit(loss)(params, x, y)
    close(found, expected)
    assert types_of(found) == types_of(expected)


@pytest.mark.parametrize("replicas", [1, 2])
def test_rows_are_joined_along_an_automatic_axis_beside_an_explicit_one(replicas):
    kinds = (AxisType.Auto, AxisType.Explicit)
    devices = jax.devices()[: 2 * replicas]
    mesh = jax.make_mesh((replicas, 2), ("data", "model"), axis_types=kinds, devices=devices)
    aux = {name: FITTING[name] for name in ("mean", "rows", "columns")}
    loss = loss_with(*aux)
    params, x, y = data()
    found = stepped(make(loss, mesh=mesh, aux=aux), placed(mesh, params), *placed(mesh, (x, y)))[0]
    close(found, jax.jit(loss)(params, x, y))


@pytest.mark.parametrize("replicas", [1, 4])
def test_what_is_not_said_is_refused_in_one_error_with_the_line(replicas):
    run = make(loss_with(*OUTPUTS), mesh=grid(replicas), aux={"float sum": "sum"})
    with pytest.raises(ValueError, match="does not say how") as error:
        stepped(run, *data())
    message = str(error.value)
    listed = re.findall(r"^  \['([\w ]+)'\]", message, re.M)
    assert set(listed) == set(OUTPUTS) - {"float sum"}
    (line,) = re.findall("aux=.*", message)
    written = eval(f"dict({line})")["aux"]
    assert written.keys() == OUTPUTS.keys()
    assert written["float sum"] == "sum"
    assert written["exp"] == "mean|stack|sum"
    assert written["rows"] == "join|mean|stack|sum"
    assert written["statistics"] == {"mean": "join|mean|stack|sum"}
    with pytest.raises(ValueError, match=r"must be one of .*, got 'join\|mean\|stack\|sum'"):
        make(loss_with(*OUTPUTS), aux=written)


def test_what_is_handed_back_as_it_came_needs_no_word():
    def loss(params, x, y, carried):
        value = per_example(params, x, y)[1].mean()
        same = {"params": params, **carried}
        return value, {"same": same, "next": carried["step"] + 1, "batch": x}

    mesh = grid(4)
    params, x, y = data()
    carried = {"step": jnp.int32(7), "key": jax.random.key(3), "table": jnp.arange(6.0)}
    specs = (P("data"), P("data"), P())
    with pytest.raises(ValueError, match="does not say how") as error:
        stepped(make(loss, mesh=mesh, batch_specs=specs), params, x, y, carried)
    assert "['next']" in str(error.value)
    assert "['batch']" in str(error.value)  # of which each replica has its own
    assert "['same']" not in str(error.value).split("Write")[0]
    # What JAX knows to be equal everywhere has a mean of any type: itself.
    run = make(loss, mesh=mesh, batch_specs=specs, aux={"next": "mean", "batch": "join"})
    aux = stepped(run, params, x, y, carried)[0][1]
    assert aux["next"] == 8
    equal(aux["same"]["table"], carried["table"])
    assert aux["same"]["key"] == carried["key"]
    equal(aux["same"]["params"], params)


def test_an_axis_may_be_numpys_and_a_word_needs_an_output():
    run = make(loss_with("columns"), mesh=grid(2), aux={"columns": np.int64(1)})
    assert stepped(run, *data())[0][1]["columns"].shape == (CLASSES, EXAMPLES)
    without = jaxcomp.value_and_grad(
        lambda *args: per_example(*args)[1].mean(), reducer("allreduce"), mesh=grid(2), aux="mean"
    )
    with pytest.raises(ValueError, match=r"returns no auxiliary output.* has_aux=True"):
        stepped(without, *data())


@pytest.mark.parametrize(
    ("name", "aux", "message"),
    [
        ("count", "mean", r"int32\[\], has no mean over .* Say one of stack\|sum"),
        ("key", "mean", r"key<fry>\[\], has no mean over .* Say one of stack"),
        ("max", "join", "has no axis 0 along which to join rows"),
        ("rows", 2, "has no axis 2"),
        ("columns", "join", "along axis 1 as there are examples, but .* Say 1, or 0 if its rows"),
        ("count", {"counts": "sum"}, r"`aux` names \['counts'\]; .* output has \['count'\]"),
        ("count", ["sum"], r"`aux` names \[0\]; the auxiliary output has \['count'\]"),
    ],
)
def test_what_cannot_be_so_is_refused(name, aux, message):
    with pytest.raises(ValueError, match=message):
        stepped(make(loss_with(name), mesh=grid(2), aux=aux), *data())


def test_stack_gives_an_axis_of_replicas_and_words_need_no_types():
    run = make(loss_with("max", "replica"), mesh=grid(4), aux="stack", check_vma=False)
    aux = stepped(run, *data())[0][1]
    losses = per_example(*data())[1]
    assert_allclose(aux["max"], losses.reshape(4, -1).max(1), rtol=1e-6)
    equal(aux["replica"], np.arange(4))


@pytest.mark.parametrize("different", [None, "count", "flag", "four bits", "key"])
def test_without_types_counters_and_keys_are_compared(different):
    """Keeps what is equal on all replicas, and says by the loss if it is not."""

    def loss(params, x, y, rest):
        replica = jax.lax.axis_index("data")
        new = {
            "count": rest["count"] + 1,
            "flag": ~rest["flag"],
            "four bits": rest["four bits"],
            "key": jax.random.fold_in(rest["key"], 3),
        }
        apart = {
            "count": new["count"] + replica,
            "flag": replica > 0,
            "four bits": replica.astype(jnp.int4),
            "key": jax.random.fold_in(rest["key"], replica),
        }
        if different:
            new[different] = apart[different]
        return per_example(params, x, y)[1].mean(), new

    rest = {"count": jnp.int32(2**24), "flag": jnp.bool_(True), "key": jax.random.key(1)}
    rest["four bits"] = jnp.int4(-3)
    specs = (P("data"), P("data"), P())
    run = make(loss, mesh=grid(2), aux="mean", batch_specs=specs, check_vma=False)
    (value, new), _ = stepped(run, *data(), rest)
    assert np.isnan(value) == (different is not None)
    if different is None:
        assert int(new["count"]) == 2**24 + 1
        assert not bool(new["flag"])
        assert int(new["four bits"]) == -3
        equal(
            jax.random.key_data(new["key"]), jax.random.key_data(jax.random.fold_in(rest["key"], 3))
        )


def test_outputs_finds_out_what_each_of_them_is(capsys):
    run = make(loss_with(*OUTPUTS), mesh=grid(4))
    words = run.outputs(*placed(grid(4, "explicit"), data()))
    expected = {name: word for name, (_, word) in OUTPUTS.items()}
    assert words == expected
    table, _, line = capsys.readouterr().out.rstrip().rpartition("\n")
    assert eval(f"dict({line})")["aux"] == words
    assert "the loss" in table.splitlines()[1]
    for name, remark in {
        "columns": "rows along axis 1",
        "sorted": "the rows in another order",
        "views": "the rows in another order",
        "max": "the larger of both",
        "variance": "nearest is the mean of both halves",
    }.items():
        assert re.search(rf"\['{name}'\].*{remark}", table)
    # What has no word is refused as long as the user has given none.
    with pytest.raises(ValueError, match="does not say how"):
        stepped(make(loss_with(*OUTPUTS), mesh=grid(4), aux=words), *data())


def test_outputs_of_weighted_means_keys_and_other_axes(capsys):
    def loss(params, x, y, mask, key):
        _, losses = per_example(params, x.T, y)
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        mean = (losses * mask).sum() / mask.sum()
        return mean, (mean, losses * mask, jax.random.uniform(key))

    params, x, y = data()
    mask = jnp.float32(jnp.arange(EXAMPLES) % 3 > 0).at[:8].set(0)
    specs = (P(None, "data"), P("data"), P("data"), P())
    run = make(loss, mesh=grid(2), batch_specs=specs)
    arguments = (params, x.T, y, mask, jax.random.key(1))
    assert run.outputs(*arguments, weight=mask) == ("mean", "join", None)
    assert "pass weight=" not in capsys.readouterr().out
    assert run.outputs(*arguments)[0] is None
    table = capsys.readouterr().out
    assert "nearest is the mean of both halves" in table
    assert "mean over a count, such as tokens, pass weight=" in table


def test_outputs_that_one_batch_cannot_tell_apart_have_no_word():
    """Tells none for `any` and `all`, which are sums where one half has such an example."""

    def loss(params, x, y):
        losses = per_example(params, x, y)[1]
        peak = jnp.maximum(x - 50, 0).max()
        zero = (losses < 0).sum()
        return losses.mean(), ((x > 50).any(), (losses > -1).all(), peak, zero, losses.mean() / 0)

    params, x, y = data()
    assert make(loss, mesh=grid(2)).outputs(params, x.at[0].set(60), y) == (None,) * 5


def test_outputs_that_are_all_zero_have_no_word(capsys):
    params, x, y = data()
    run = make(lambda params, x, y: (params.sum() * x.sum(), x.sum() * 0), mesh=grid(2))
    assert run.outputs(0 * params, x, y) is None
    assert capsys.readouterr().out.count("zero in the batch and in both halves") == 2


def test_outputs_of_a_batch_with_equal_halves_tell_no_mean_from_a_maximum():
    params, x, y = data()
    run = make(loss_with("exp", "max", "mean", "rows"), mesh=grid(2))
    twice = [np.concatenate([a[: EXAMPLES // 2]] * 2) for a in (x, y)]
    words = run.outputs(params, *twice)
    assert words == {"exp": None, "max": None, "mean": None, "rows": "join"}


def test_outputs_of_one_place_are_no_means_where_all_examples_are_alike():
    """Asks at the start of training, where all losses are about the logarithm of the classes."""

    def loss(params, x, y):
        losses = per_example(params, x, y)[1]
        of_micro_batches = losses.reshape(2, -1).mean(1)
        places = (losses[0], losses[: len(y) // 2].mean(), of_micro_batches[-1], of_micro_batches)
        return losses.mean(), (*places, losses.mean())

    params, x, y = data()
    assert make(loss, mesh=grid(2)).outputs(1e-3 * params, x, y) == (None,) * 4 + ("mean",)


def test_outputs_looks_at_both_parts_of_complex_numbers():
    def loss(params, x, y):
        losses = per_example(params, x, y)[1]
        none = jnp.zeros([])
        largest = jax.lax.complex(none, losses.max())
        sums = jax.lax.complex(losses.sum(), x.sum())
        return losses.mean(), (largest, sums, jax.lax.complex(losses, losses))

    assert make(loss, mesh=grid(2)).outputs(*data()) == (None, "sum", "join")


def test_outputs_may_be_numbers_of_python(capsys):
    def loss(params, x, y):
        return per_example(params, x, y)[1].mean(), {"examples": len(y), "rate": 0.5, "on": True}

    words = make(loss, mesh=grid(2)).outputs(*data())
    assert words == {"examples": "sum", "rate": "mean", "on": None}
    assert '"mean" keeps what is always the same' in capsys.readouterr().out


def test_a_loss_that_divides_by_the_global_batch_is_told_apart():
    def total(params, x, y):  # as if divided by a constant
        return per_example(params, x, y)[1].sum() / EXAMPLES

    run = jaxcomp.value_and_grad(total, reducer("allreduce"))
    with pytest.raises(ValueError, match="is divided by a constant"):
        run.outputs(*data())
    right = jaxcomp.value_and_grad(lambda *args: per_example(*args)[1].mean(), reducer("allreduce"))
    assert right.outputs(*data()) is None


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda loss, grads: ({"loss": loss}, grads), r"scalar, .*, got {'loss': 'float32\[\]'}"),
        (lambda loss, grads: (({"loss": loss}, 1.0), grads), "scalar, .*, got {'loss': 'float32"),
        (lambda loss, grads: (None, grads), "scalar, .*, got None"),
        (lambda loss, grads: (loss[None], grads), r"scalar, .*, got float32\[1\]"),
        (lambda loss, grads: (loss.astype("i4"), grads), r"scalar, .*, got int32\[\]"),
        (lambda loss, grads: ((loss,), grads), r"scalar, .*, got \('float32\[\]',\)"),
        (lambda loss, grads: grads, r"must return .*, got float32\[16, 8\]"),
        (lambda loss, grads: [loss, grads], r"must return .*, got \['float32\[\]', 'float32"),
        (lambda loss, grads: ((loss, {"name": "x"}), grads), r"\['name'\] is a str"),
        (lambda loss, grads: ((loss, np.array(["x"])), grads), r"\(root\) is a <U1, and out"),
    ],
)
def test_a_value_that_is_no_scalar_is_one_sentence(result, message):
    def gradients(params, x, y):
        loss = lambda params: per_example(params, x, y)[1].mean()  # noqa: E731
        return result(*jax.value_and_grad(loss)(params))

    run = jaxcomp.data_parallel(gradients, reducer("allreduce"), mesh=grid(2))
    for call in (functools.partial(stepped, run), run.outputs):
        with pytest.raises(ValueError, match=message):
            call(*data())


def test_outputs_is_not_called_inside_jit():
    run = make(loss_with("mean"), mesh=grid(2))
    with pytest.raises(ValueError, match=r"inside of jax\.jit there are none"):
        jax.jit(run.outputs)(*data())


class Metrics(flax.struct.PyTreeNode):
    loss: Any
    count: Any


def test_words_may_be_a_tree_of_any_containers_that_ends_early():
    def loss(params, x, y):
        logits, losses = per_example(params, x, y)
        statistics = nnx.State({"norm": {"mean": logits.mean(0), "square": (logits**2).mean(0)}})
        metrics = Metrics(losses.mean(), (y > 3).sum())
        return losses.mean(), {"metrics": metrics, "rest": statistics, "none": {}}

    said = {"metrics": Metrics("mean", "sum"), "none": "mean"}
    for rest in ("mean", {"norm": "mean"}):
        run = make(loss, mesh=grid(2), aux={**said, "rest": rest})
        close(stepped(run, *data())[0], loss(*data()))
    for wrong in (["mean"], {"rest": {"norm": ["mean"]}}, {"metrics": {"loss": {"x": "mean"}}}):
        with pytest.raises(ValueError, match=r"`aux` names .*; the auxiliary output has"):
            stepped(make(loss, mesh=grid(2), aux=wrong), *data())
