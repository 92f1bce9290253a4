"""Layers in a scan, whose gradients are reduced inside the backward scan.

Differentiated as it is, a scan gives the gradients of all its layers at its end, when nothing is
left to hide their collectives behind. Here the backward pass is written out: while it computes the
gradient of one layer, that of the layer after it, which is ready, travels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import Array, KeyPath, PyTree
from jaxcomp._mesh.axes import as_local, typed_like
from jaxcomp._mesh.per_replica import mark_local
from jaxcomp._reducers.contract import Reducer
from jaxcomp._reducers.opening import marked
from jaxcomp._training.gradients import check_loss
from jaxcomp._training.scan_passes import Block, Call, Carried, Training, is_floating, run, scanned
from jaxcomp._training.scan_state import (
    ScanState,
    as_floats,
    depth_of,
    from_floats,
    stacked_init,
)


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity: jax.jit may take it
class ScanLayers:
    """What `scan_layers` returns: the scan as a call, and `value_and_grad`."""

    block: Block
    reducer: Reducer

    def __call__(self, params: PyTree, x: PyTree, *args: PyTree) -> PyTree:
        """The layers, one after the other.

        Args:
          params: Stacked parameters; in the function given to `value_and_grad`, that part of its
            parameters, unchanged.
          x: What the first layer takes, and each returns: an array, or a tree of arrays.
          *args: What every layer takes besides: masks, positions, a random key. Trees of arrays.

        Returns:
          What the last layer returned.

        Raises:
          ValueError: If `block` returns anything but what it takes, or leading axes differ.
        """
        if not isinstance(params, Training):
            depth_of(params)
            return scanned(self.block, params, x, args)[0]
        params.call.begin(self)
        return run(self.block, self.reducer, params, x, args)

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        part: str,
        *,
        rest: Reducer | None = None,
        has_aux: bool = False,
    ) -> ScanValueAndGrad:
        """`jax.value_and_grad` with averaged gradients, those of the layers from within their scan.

        Args:
          fun: The mean loss of this replica's examples: a scalar, or (scalar, auxiliary) with
            `has_aux`. It takes the parameters first, and calls these layers once, on the part of
            them that `part` names; it may cast them before, or add a penalty on them, which is not
            compressed. Inside `jax.vmap`, a loop or a branch of `fun` they run another number of
            times, and all gradients are NaN: accumulate over calls of ``value_and_grad``.
          part: The name of the part of the parameters that holds the stacked layers, a key or an
            attribute at any depth.
          rest: The reducer of all other parameters; None for the one of the layers.
          has_aux: As for `jax.value_and_grad`.

        Returns:
          A `ScanValueAndGrad`: ``init(params)`` gives the state, and a call
          ``(state, params, *batch)`` inside of the mapped function ``((value, grads), state)``.

        Raises:
          ValueError: If an argument is unusable.
        """
        rest = self.reducer if rest is None else _checked("rest", rest)
        if rest.axis_name != self.reducer.axis_name:
            raise ValueError(
                f"`rest` must have the axis_name of the layers' reducer, "
                f"{self.reducer.axis_name!r}, got {rest.axis_name!r}."
            )
        if not callable(fun):
            raise ValueError(f"`fun` must be a function, got {fun!r}.")
        if not isinstance(part, str) or not part:
            raise ValueError(f"`part` must be the name of a part of the parameters, got {part!r}.")
        return ScanValueAndGrad(self, fun, part, rest, has_aux)


@dataclasses.dataclass(frozen=True, eq=False)
class ScanValueAndGrad:
    """What `ScanLayers.value_and_grad` returns: `init`, and the gradient itself as a call."""

    layers: ScanLayers
    fun: Callable[..., Any]
    part: str
    rest: Reducer
    has_aux: bool

    def init(self, params: PyTree) -> ScanState:
        """The state before the first step, consolidated, for `state_specs` and `shard_state`.

        Args:
          params: All parameters.

        Returns:
          The state. All layers begin with the same one, the random factors of `powersgd` included.

        Raises:
          ValueError: If no part, or several, have the name, or leading axes differ.
        """
        found = _Parts.of(params, self.part)
        state, mark = stacked_init(self.layers.reducer, found.layers)
        return ScanState(state, self.rest.init(found.rest), mark)

    def __call__(
        self, state: ScanState, params: PyTree, *args: Any, weight: Any = None, **kwargs: Any
    ) -> Any:
        """Value and averaged gradients; call it inside the mapped function.

        Args:
          state: From `init` or the last call.
          params: All parameters, the same on every replica.
          *args: As `fun` takes them.
          weight: How much this replica counts, as in ``update`` of every `Reducer`.
          **kwargs: As `fun` takes them.

        Returns:
          ``((value, gradients), state)``, or ``(((value, auxiliary), gradients), state)`` with
          `has_aux`. The value is this replica's own. If a gradient of any leaf is not finite on any
          replica, all gradients are NaN, and the state is the old one, bit for bit.

        Raises:
          ValueError: At tracing time, if the axis is not bound, `fun` averages its loss or does not
            call the layers once, or the state is of another number of layers.
        """
        axis_name = self.layers.reducer.axis_name
        weights = {} if weight is None else {"weight": weight}
        found = _Parts.of(params, self.part)
        depth = depth_of(found.layers)
        old = mark_local(state, axis_name)
        _check_depth(old.layers, depth)
        call = Call(self.layers, old.layers, {"mark": old.mark, **weights})

        def loss(rest: PyTree, layers: PyTree, carried: Carried) -> Any:
            call.carried = carried
            return self.fun(found.joined(rest, Training(layers, call)), *args, **kwargs)

        # The layers' parameters stay as they are: what comes back for them is averaged already.
        carried = Carried(as_floats(old.layers), typed_like(jnp.zeros([]), found.layers))
        value, (grads, layer_grads, (floats, flag)) = jax.value_and_grad(
            loss, argnums=(0, 1, 2), has_aux=self.has_aux
        )(as_local(found.rest, axis_name), found.layers, carried)
        call.check_ended()
        check_loss(value[0] if self.has_aux else value, axis_name)
        finite = flag == 1  # were the layers run several times, their flags would have added up

        # NaN in one of them, or in the layers, keeps the other reducer's state as it was.
        grads = _nan_unless(finite, grads)
        reduced = self.rest.reduce(grads, state.rest, found.rest, **weights)
        finite &= reduced.finite
        layers = jax.tree.map(
            lambda new, kept: jnp.where(finite, new, kept),
            from_floats(floats, old.layers),
            old.layers,
        )
        mark = marked(old.mark, axis_name, finite)
        averaged = found.joined(reduced.updates, _nan_unless(finite, layer_grads))
        return (value, averaged), ScanState(layers, reduced.state, mark)

    def bytes(
        self, params: PyTree, *, replicas: int | None = None, step: int | None = None
    ) -> CompressionStats:
        """Counts what each replica sends in one step, as ``bytes`` of a `Reducer`.

        Args:
          params: All parameters, or their shapes.
          replicas: As there.
          step: As there.

        Returns:
          The payload per replica in bytes. What is listed of a leaf of the layers is of all layers.

        Raises:
          ValueError: As there, and as `init`.
        """
        found, asked = _Parts.of(params, self.part), {"replicas": replicas, "step": step}
        depth = depth_of(found.layers)
        layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), found.layers)
        leaves = [
            dataclasses.replace(
                leaf,
                path=found.name + leaf.path.removeprefix("(root)"),
                shape=(depth, *leaf.shape),
                bytes_before=depth * leaf.bytes_before,
                bytes_after=depth * leaf.bytes_after,
            )
            for leaf in self.layers.reducer.bytes(layer, **asked).leaves
        ]
        return CompressionStats.of([*leaves, *self.rest.bytes(found.rest, **asked).leaves])


def scan_layers(block: Block, reducer: Reducer) -> ScanLayers:
    """`jax.lax.scan` over layers whose gradients are reduced inside the backward scan.

    A scan gives the gradients of all layers when it ends, so that a reducer behind it has nothing
    left to hide its collectives behind. This one runs the reducer in the backward scan, one layer
    behind: while the gradient of a layer is computed, that of the layer after it is averaged. The
    two need nothing of each other, and on GPUs XLA runs them side by side. Two all-reduces a layer
    with `powersgd`, however many leaves it has.

    Gradients and states are those of the reducer applied to every layer on its own, one after the
    other. Only `init` is the same for all layers, so that the first power iteration of `powersgd`
    starts from the same random factor in each of them.

    The backward pass computes each block a second time, as `jax.checkpoint` around it would, and
    keeps nothing of it but what went in. Whether a step is finite is known when the pass has ended:
    until then the old state is kept beside the new one, a second copy of the layers' residuals
    (``residual_dtype=jnp.bfloat16`` halves both).

    One-sided steps, ``powersgd(alternating=True)``, take one all-reduce a layer. For each form of a
    step (exact before `start_step`, with left and with right factors) there is a backward scan of
    its own in the program, because no collective is moved out of a conditional: with
    ``start_step=0`` there is one less to compile. `switch_at` and reducers in `error_feedback`
    have their conditionals in the scan.

    Args:
      block: One layer: a function of its parameters, `x` and further arguments that returns what
        the next layer takes, of the same shapes and dtypes. What is to come out of every layer,
        such as an auxiliary loss, is summed in `x`, a tree then. No value that is differentiated
        may be closed over; pass it as a further argument.
      reducer: The reducer of one layer's gradients.

    Returns:
      A `ScanLayers`. Its call ``(params, x, *args)`` runs the layers, and its ``value_and_grad``
      makes the training step of a loss that does so.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> layers = jaxcomp.scan_layers(
      ...     lambda w, x: x + jnp.tanh(x @ w),
      ...     jaxcomp.powersgd(rank=2, axis_name="data", start_step=0))
      >>> def loss_fn(params, x):
      ...     return jnp.mean((layers(params["layers"], x) @ params["head"]) ** 2)
      >>> value_and_grad = layers.value_and_grad(loss_fn, "layers")
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> params = {"layers": 0.1 * jax.random.normal(keys[0], (5, 16, 16)),  # five layers
      ...           "head": jax.random.normal(keys[1], (16, 1))}
      >>> state = jaxcomp.stack_replicas(value_and_grad.init(params), 4)
      >>> axes = jaxcomp.state_axes(state)
      >>> step = jax.vmap(  # over four replicas; a training loop has jax.shard_map
      ...     value_and_grad, in_axes=(axes, None, 0), out_axes=((0, None), axes),
      ...     axis_name="data")
      >>> (loss, grads), state = step(state, params, jax.random.normal(keys[2], (4, 8, 16)))
      >>> grads["layers"].shape, state.layers.residual.shape
      ((5, 16, 16), (4, 5, 16, 16))
      >>> jnp.linalg.matrix_rank(grads["layers"]).tolist()
      [2, 2, 2, 2, 2]
    """
    if not callable(block):
        raise ValueError(f"`block` must be a function of (params, x), got {block!r}.")
    return ScanLayers(block, _checked("reducer", reducer))


def _checked(name: str, reducer: Any) -> Reducer:
    if not isinstance(reducer, Reducer):
        raise ValueError(
            f"`{name}` must be a jaxcomp reducer, got {type(reducer).__name__}. Pass the first "
            "link of the chain here, and keep the optimizer behind the gradients."
        )
    return reducer


def _check_depth(state: PyTree, depth: int) -> None:
    """Refuses a state of other layers.

    Raises:
      ValueError: With what to do.
    """
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        if jnp.shape(x)[:1] != (depth,):
            raise ValueError(
                f"The leaf {leaf_name(path)} of `state`, of shape {jnp.shape(x)}, does not fit "
                f"parameters of {depth} layers. Make the state with init(params), and map it with "
                "jaxcomp.state_specs or jaxcomp.state_axes."
            )


def _nan_unless(finite: Array, tree: PyTree) -> PyTree:
    """The floating leaves, or NaN throughout."""
    return jax.tree.map(lambda x: jnp.where(finite, x, jnp.nan) if is_floating(x) else x, tree)


class _Parts(NamedTuple):
    """Parameters taken apart."""

    layers: PyTree
    rest: PyTree  # a masked node in the place of the layers
    treedef: Any
    place: int
    name: str  # the path of the layers, as users write it

    @classmethod
    def of(cls, params: PyTree, name: str) -> _Parts:
        """The part of this name and the rest.

        Raises:
          ValueError: If there is not one part of this name.
        """

        def is_part(path: KeyPath, node: Any = None) -> bool:
            del node
            return bool(path) and name == getattr(path[-1], "key", getattr(path[-1], "name", None))

        found, treedef = jax.tree_util.tree_flatten_with_path(
            params, is_leaf=is_part, is_leaf_takes_path=True
        )
        places = [i for i, (path, _) in enumerate(found) if is_part(path)]
        if len(places) != 1:
            among = ", ".join(leaf_name(path) for path, _ in found)
            raise ValueError(
                f"`part` must name one part of the parameters, and {len(places)} are called "
                f"{name!r}: {among}."
            )
        nodes = [node for _, node in found]
        layers, nodes[places[0]] = nodes[places[0]], optax.MaskedNode()
        return cls(
            layers, treedef.unflatten(nodes), treedef, places[0], leaf_name(found[places[0]][0])
        )

    def joined(self, rest: PyTree, layers: PyTree) -> PyTree:
        """The whole tree, of other values."""
        nodes = self.treedef.flatten_up_to(rest)
        nodes[self.place] = layers
        return self.treedef.unflatten(nodes)
