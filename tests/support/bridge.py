"""Weights of torch and trees of Flax, and parts of torch_bridge with the options of `pair`."""

import numpy as np

import torch_bridge


def values(*shape, dtype=np.float32):
    """Always the same ones for a shape."""
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape).astype(dtype)


def kernels(**shapes):
    """Layers in Flax by name."""
    return {name: {"kernel": np.zeros(shape, np.float32)} for name, shape in shapes.items()}


def linears(**shapes):
    """The same with biases."""
    found = kernels(**shapes)
    for name, shape in shapes.items():
        found[name]["bias"] = np.zeros(shape[1:], np.float32)
    return found


def norm(width):
    """A normalisation in Flax."""
    return {"scale": np.zeros(width, np.float32), "bias": np.zeros(width, np.float32)}


def params_from_torch(model, like, rules=(), **said):
    """The parameters in Flax, by rules and answers."""
    return torch_bridge.params_from_torch(model, like, rules=rules, **said)


def params_to_torch(params, like, rules=(), **said):
    """The parameters in torch, by the same."""
    found = torch_bridge.pair(like, params, rules, **said)
    return torch_bridge.params_to_torch(params, like, pairs=found)
