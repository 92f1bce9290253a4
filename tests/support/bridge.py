"""Parts of torch_bridge with the options of `pair`, which they take as pairs."""

import torch_bridge


def params_from_torch(model, like, rules=(), **said):
    """The parameters in Flax, by rules and answers."""
    return torch_bridge.params_from_torch(model, like, rules=rules, **said)


def params_to_torch(params, like, rules=(), **said):
    """The parameters in torch, by the same."""
    found = torch_bridge.pair(like, params, rules, **said)
    return torch_bridge.params_to_torch(params, like, pairs=found)
