"""`state_dict` and `load_state_dict`, in torch's sense, for the states of jaxcomp's reducers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._pairing.leaves import plain_path

VERSION = 1
State = TypeVar("State", bound=tuple)


def state_dict(state: tuple[Any, ...]) -> dict[str, Any]:
    """A `jaxcomp.PowerSGDState` as plain nested dicts of NumPy arrays.

    Args:
      state: A consolidated ``PowerSGDState`` (or another reducer's state: any NamedTuple).

    Returns:
      ``{'version': 1, 'count': ..., 'residual': {...}, 'q': {...}}``, nested as the parameters are.
      Leaves that are not compressed are left out. Any format that stores arrays can store it.

    Raises:
      ValueError: If `state` is not a reducer's state.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> params = {"fc": {"kernel": jnp.zeros((8, 16)), "bias": jnp.zeros(16)}}
        >>> state = jaxcomp.powersgd(rank=1, axis_name="data").init(params)
        >>> state_dict(state)["q"]["fc"]["kernel"].shape
        (8, 1)
    """
    result: dict[str, Any] = {"version": VERSION}
    for path, leaf in _flat(state).items():
        node = result
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = np.array(leaf)
    return result


def load_state_dict(state: State, d: Mapping[str, Any], *, strict: bool = True) -> State:
    """A state with the values of a `state_dict`.

    Args:
      state: A state of the structure wanted, as from ``powersgd(...).init(params)``. It is left as
        it is: States are values in JAX.
      d: What `state_dict` gave.
      strict: If False, what `d` lacks stays as in `state`, and what `state` lacks is skipped. As in
        torch, shapes have to agree in either case.

    Returns:
      A new state, in the dtypes of `state`.

    Raises:
      ValueError: If `state` is not a reducer's state or `d` has a version that is not known.
      CheckpointMismatch: With every missing, unexpected and mis-shaped entry.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> state = jaxcomp.powersgd(rank=1, axis_name="data").init({"w": jnp.zeros((8, 16))})
        >>> later = state_dict(state._replace(count=jnp.int32(7)))
        >>> int(load_state_dict(state, later).count)
        7
    """
    version = d.get("version")
    if version is None or np.shape(version) != () or version != VERSION:
        raise ValueError(
            f"This state dict has version {version}, and version {VERSION} is understood. Was it "
            "made by torch_bridge.state_dict, and not by a later release?"
        )
    given = _nested({key: value for key, value in d.items() if key != "version"})
    wanted = _flat(state)
    missing = ["/".join(path) for path in wanted if path not in given]
    unexpected = ["/".join(path) for path in given if path not in wanted]
    mis_shaped = [
        f"{'/'.join(path)} is {np.shape(given[path])}, wanted {np.shape(leaf)}"
        for path, leaf in wanted.items()
        if path in given and np.shape(given[path]) != np.shape(leaf)
    ]
    if mis_shaped or (strict and (missing or unexpected)):
        raise CheckpointMismatch(
            "The state dict does not fit the state: has the model, the rank or "
            "min_compression_rate changed? strict=False takes what fits.",
            missing=missing if strict else (),
            unexpected=unexpected if strict else (),
            mis_shaped=mis_shaped,
        )
    leaves = [
        jnp.asarray(given[path], jnp.result_type(leaf)) if path in given else leaf
        for path, leaf in wanted.items()
    ]
    return jax.tree.structure(state).unflatten(leaves)


def _flat(state: tuple[Any, ...]) -> dict[tuple[str, ...], Any]:
    if not hasattr(state, "_fields"):
        raise ValueError(
            f"`state` must be the state of a reducer such as jaxcomp.PowerSGDState, got "
            f"{type(state).__name__}. Take it out of the optax.chain state: state[0]."
        )
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    return {plain_path(path): leaf for path, leaf in flat}


def _nested(node: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    flat: dict[tuple[str, ...], Any] = {}
    for name, value in node.items():
        if isinstance(value, Mapping):
            flat.update(_nested(value, (*prefix, str(name))))
        else:
            flat[*prefix, str(name)] = value
    return flat
