"""A small autoencoder, and shardings of its weights over a mesh axis beside the replicas' axis."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers.classifier import placed

P = jax.P
LAYOUTS = {
    "tensor": {"up": P(None, "model"), "down": P("model"), "bias": P("model")},
    "fsdp": {"up": P("model"), "down": P("model"), "bias": P("model")},
    "replicated": {},
}


def new_params(width=32):
    rng = np.random.default_rng(0)
    values = {
        "up": rng.normal(size=(width, 2 * width)) / 6,
        "down": rng.normal(size=(2 * width, width)) / 8,
        "bias": np.zeros(2 * width),
    }
    return jax.tree.map(np.float32, values)


def parameters(mesh, layout="replicated", width=32):
    spec = LAYOUTS[layout]
    return {name: placed(mesh, x, spec.get(name, P())) for name, x in new_params(width).items()}


def loss(params, x):
    hidden = jnp.tanh(x @ params["up"] + params["bias"])
    return jnp.mean((hidden @ params["down"] - x) ** 2)
