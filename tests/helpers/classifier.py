"""A small sequence classifier with the auxiliary outputs of real training loops, and its meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
CLASSES = 5
WIDTH = 16
LENGTH = 3
WHOLE = jax.P()


def grid(data, kind="auto", model=0):
    shape, names = ((data, model), ("data", "model")) if model else ((data,), ("data",))
    kinds = (KINDS[kind],) * len(shape)
    devices = jax.devices()[: data * (model or 1)]
    return jax.make_mesh(shape, names, axis_types=kinds, devices=devices)


def placed(mesh, tree, spec=WHOLE):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def new_params():
    rng = np.random.default_rng(0)
    return {
        "up": (rng.normal(size=(WIDTH, 32)) / 4).astype(np.float32),
        "down": (rng.normal(size=(32, CLASSES)) / 6).astype(np.float32),
    }


def batch(seed=1, size=16):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, LENGTH, WIDTH)).astype(np.float32)
    return x, rng.integers(0, CLASSES, size=(size, LENGTH))


# The kind of each auxiliary output below.
AUX = {
    "logits": "join",
    "flat": "join",
    "per_example": "join",
    "hits": "join",
    "accuracy": "mean",
    "statistics": "mean",
    "time_first": 1,
}


def loss_fn(params, x, y):
    """Returns the classifier's loss and its auxiliary outputs."""
    hidden = jnp.tanh(x @ params["up"])
    logits = hidden @ params["down"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    aux = {
        "logits": logits,
        "flat": logits.reshape(-1, CLASSES),
        "per_example": losses.mean(1),
        "hits": logits.argmax(-1) == y,
        "accuracy": (logits.argmax(-1) == y).astype(jnp.float32).mean(),
        "statistics": {"mean": hidden.mean((0, 1)), "square": (hidden**2).mean((0, 1))},
        "time_first": jnp.swapaxes(losses, 0, 1),
    }
    return losses.mean(), aux


def bare_loss(params, x, y):
    return loss_fn(params, x, y)[0]


def stepped(run, params, *data, **named):
    """Returns the outputs of one compiled step from the initial state."""
    return jax.jit(run)(run.init(params), params, *data, **named)[0]
