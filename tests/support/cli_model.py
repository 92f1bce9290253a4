"""A Flax model for the command line's `--params`, and a torch run of the same."""

import jax.numpy as jnp


def params():
    return {
        "fc1": {"kernel": jnp.zeros((32, 24)), "bias": jnp.zeros(24)},
        "fc2": {"kernel": jnp.zeros((24, 48)), "bias": jnp.zeros(48)},
    }


NOT_CALLED = params()
PARAMS = ("--params", "cli_model:params")


def document():
    """What a run of one rank with momentum leaves behind; random factors and errors."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    import torch_bridge

    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("fc1", torch.nn.Linear(32, 24))
    model.add_module("fc2", torch.nn.Linear(24, 48))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    order = [["fc2.bias", "fc2.weight", "fc1.bias", "fc1.weight"]]
    layout = torch_bridge.BucketLayout.from_order(order, model.state_dict())
    slots = list(layout.factor_slots(2, 2.0))
    state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=5)
    state.iter = 20
    state.error_dict = {0: torch.randn(layout.sizes[0])}
    state.p_memory_dict = {0: torch.randn(sum(slot.rows * slot.rank for slot in slots))}
    state.q_memory_dict = {0: torch.randn(sum(slot.cols * slot.rank for slot in slots))}
    return {
        "state_dict": model.state_dict(),
        "comm_hook_state": state,
        "optimizer": optimizer.state_dict(),
        "layout": layout.to_json(),
        "world_size": 1,
        "epoch": 3,
    }
