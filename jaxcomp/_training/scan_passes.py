"""The two passes of layers in a scan: forward, and a backward one that reduces."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp._base.typing import Array, PyTree
from jaxcomp._mesh.axes import as_local, switch, typed_like
from jaxcomp._reducers.contract import Reducer
from jaxcomp._training.scan_state import (
    as_floats,
    at,
    depth_of,
    from_floats,
    put,
    with_mark,
    without_marks,
)

Block = Callable[..., PyTree]


class Carried(NamedTuple):
    """What goes into a backward pass beside the parameters, and comes out of it."""

    floats: PyTree  # the state, as `as_floats` makes it; its cotangent is the new one
    flag: Array  # float32 scalar; its cotangent is whether all layers are finite


class Call:
    """One differentiated function: how often it called the layers, and what it hides from users."""

    def __init__(self, layers: Any, state: PyTree, beside: dict[str, Any]) -> None:
        self.layers, self.times = layers, 0
        self.state = state  # itself, for its dtypes
        self.beside = beside  # the mark, and a weight if there is one
        self.carried: Carried | None = None

    def begin(self, layers: Any) -> None:
        """Counts a call.

        Raises:
          ValueError: If it is of other layers, or the second one.
        """
        self.times += 1
        if layers is not self.layers or self.times > 1:
            raise ValueError(
                "`fun` must call the layers whose value_and_grad this is, and once. Sum what "
                "several calls would give inside of `block`, or give each a scan of its own "
                "and leave all but one to the other reducer."
            )

    def check_ended(self) -> None:
        """Refuses a function without a call.

        Raises:
          ValueError: With what to do.
        """
        if not self.times:
            raise ValueError(
                "`fun` did not call the layers on the part of its parameters that `part` names."
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Training:
    """What stands for the layers' parameters while they are differentiated.

    Its leaves are these and nothing else: a loss may cast them, or sum their squares.
    """

    params: PyTree
    call: Call = dataclasses.field(metadata={"static": True})

    def __getattr__(self, name: str) -> Any:
        # Of an AttributeError, which those who ask whether there is one expect.
        raise AttributeError(_asked_for(f"`.{name}`"))

    def __getitem__(self, key: Any) -> Any:
        raise ValueError(_asked_for(repr(key)))

    def _as_operand(self, other: Any) -> Any:
        del other
        raise ValueError(_asked_for("its value"))

    __matmul__ = __rmatmul__ = __mul__ = __rmul__ = __add__ = __radd__ = _as_operand


def _asked_for(what: str) -> str:
    return (
        f"The parameters of scanned layers go into layers(params, x) as they are, and {what} "
        "of them was asked for. What else the loss needs of them belongs into `block`."
    )


def is_floating(x: Any) -> bool:
    """Whether it has a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def scanned(block: Block, params: PyTree, x: PyTree, args: Any) -> tuple[PyTree, PyTree]:
    """The output of the last layer, and the stacked inputs of all."""

    def turn(x: PyTree, layer: PyTree) -> tuple[PyTree, PyTree]:
        y = block(layer, x, *args)
        if (got := _types(y)) != (want := _types(x)):
            raise ValueError(
                "`block` must return what it takes, of the same structure, shapes and dtypes: it "
                f"took {want} and returned {got}. Cast its result to the dtype of `x`; put an "
                "auxiliary output into `x`, as a sum over the layers."
            )
        return y, x

    return lax.scan(turn, x, params)


def _types(tree: PyTree) -> str:
    return str(jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree))


class _Floating(NamedTuple):
    """Which leaves of a tree are floating: only those have gradients that a scan can carry."""

    treedef: Any
    flags: list[bool]

    @classmethod
    def of(cls, tree: PyTree) -> tuple[_Floating, list[Array], list[Array]]:
        """Which they are, those, and the others."""
        leaves, treedef = jax.tree.flatten(jax.tree.map(_as_array, tree))
        flags = [is_floating(x) for x in leaves]
        own, others = (
            [x for x, flag in zip(leaves, flags, strict=True) if flag == wanted]
            for wanted in (True, False)
        )
        return cls(treedef, flags), own, others

    def joined(self, own: list[Array], others: list[Array]) -> PyTree:
        """The tree again."""
        queues = iter(others), iter(own)
        return self.treedef.unflatten([next(queues[flag]) for flag in self.flags])

    def taken(self, tree: PyTree) -> list[Array]:
        """The floating leaves of a tree of the same types."""
        leaves = jax.tree.leaves(tree)
        return [x for x, flag in zip(leaves, self.flags, strict=True) if flag]


def _as_array(x: Any) -> Any:
    return x if hasattr(x, "dtype") else jnp.asarray(x)


class _Pending(NamedTuple):
    """What one layer's backward pass gave."""

    grads: PyTree  # of its parameters, local: still to be reduced
    x: list[Array]  # of its input
    args: list[Array]  # of the further arguments, summed over the layers so far


class _Stacks(NamedTuple):
    """What is reduced already."""

    means: PyTree  # of all layers
    floats: PyTree  # the new state
    finite: Array  # bool scalar


def run(
    block: Block, reducer: Reducer, training: Training, x: PyTree, args: tuple[PyTree, ...]
) -> PyTree:
    """The forward scan, with a backward pass that reduces."""
    x, args = as_local((x, args), reducer.axis_name)
    kind_x, own_x, other_x = _Floating.of(x)
    kind_args, own_args, other_args = _Floating.of(args)
    call = training.call
    assert call.carried is not None  # set before the function that called the layers
    scan = _Scan(block, reducer, call.state, kind_x, kind_args)
    function = jax.custom_vjp(lambda *given: scan.forward(*given)[0])
    function.defvjp(scan.forward, scan.backward)
    return kind_x.joined(
        *function(
            (training.params, *call.carried),
            call.beside,
            own_x,
            own_args,
            other_x,
            other_args,
        )
    )


@dataclasses.dataclass(frozen=True)
class _Scan:
    """The two rules of the scan for `jax.custom_vjp`."""

    block: Block
    reducer: Reducer
    state: PyTree  # for its dtypes only
    x: _Floating
    args: _Floating

    def forward(
        self, carried: Any, beside: Any, own_x: Any, own_args: Any, other_x: Any, other_args: Any
    ) -> tuple[Any, Any]:
        """The layers' output, floating leaves and others, and what `backward` needs."""
        x, args = self.x.joined(own_x, other_x), self.args.joined(own_args, other_args)
        y, inputs = scanned(self.block, carried[0], x, args)
        _, *outputs = _Floating.of(y)
        return tuple(outputs), (carried, beside, inputs, own_args, other_args)

    def backward(self, saved: Any, cotangents: Any) -> tuple[Any, ...]:
        """From the last layer to the first, the reducer one layer behind.

        If it has several forms, there is one such loop for each. They are chosen here, once, and
        not in the loop, where a conditional would hold the collectives back.
        """
        turns = self.reducer.turns
        if turns is None:
            return self._backward(self.reducer, saved, cotangents)
        (_, floats, _), _, *_ = saved  # all layers are at the same step
        first = from_floats(at(floats, 0), self.state)
        backward = [
            functools.partial(self._backward, reducer, saved, cotangents)
            for reducer in turns.reducers
        ]
        return switch(turns.of(first), backward)

    def _backward(self, reducer: Reducer, saved: Any, cotangents: Any) -> tuple[Any, ...]:
        (params, floats, flag), beside, inputs, own_args, other_args = saved
        last = depth_of(params) - 1
        axis_name = reducer.axis_name

        def differentiated(i: Any, x_bar: list[Array]) -> _Pending:
            kind, own, others = _Floating.of(at(inputs, i))

            def layer(p: PyTree, own: list[Array], own_args: list[Array]) -> list[Array]:
                args = self.args.joined(own_args, other_args)
                return kind.taken(self.block(p, kind.joined(own, others), *args))

            local = as_local(at(params, i), axis_name)
            with jax.named_scope("layer_backward"):
                return _Pending(*jax.vjp(layer, local, own, own_args)[1](x_bar))

        def reduced(i: Any, grads: PyTree) -> _Stacks:
            weights = {name: x for name, x in beside.items() if name != "mark"}
            state = with_mark(from_floats(at(floats, i), self.state), beside["mark"])
            with jax.named_scope("layer_reduce"):
                result = reducer.reduce(grads, state, at(params, i), **weights)
            new, _ = without_marks(result.state)
            return _Stacks(result.updates, as_floats(new), result.finite)

        def added(stacks: _Stacks, i: Any, grads: PyTree) -> _Stacks:
            one = reduced(i, grads)
            return _Stacks(
                put(stacks.means, i, one.means),
                put(stacks.floats, i, one.floats),
                stacks.finite & one.finite,
            )

        def turn(carry: tuple[_Pending, _Stacks], i: Array) -> tuple[Any, None]:
            after, stacks = carry
            stacks = added(stacks, i + 1, after.grads)
            found = differentiated(i, after.x)
            args = [x + y for x, y in zip(after.args, found.args, strict=True)]
            return (found._replace(args=args), stacks), None

        pending = differentiated(last, cotangents[0])
        carry = pending, _empty(params, floats, lambda: reduced(last, pending.grads))
        if last:
            carry, _ = lax.scan(turn, carry, jnp.arange(last - 1, -1, -1))
        pending, stacks = carry
        stacks = added(stacks, 0, pending.grads)
        bars = stacks.means, stacks.floats, stacks.finite.astype(flag.dtype)
        bars = jax.tree.map(lambda bar, x: typed_like(bar, x), bars, (params, floats, flag))
        return bars, None, pending.x, pending.args, None, None


def _empty(params: PyTree, floats: PyTree, reduced: Callable[[], _Stacks]) -> _Stacks:
    """Stacks to be filled: laid out as what they replace, typed as what comes into them."""
    like = jax.eval_shape(reduced)
    means, floats = jax.tree.map(
        lambda old, new: typed_like(jnp.zeros_like(old), new),
        (params, floats),
        (like.means, like.floats),
    )
    return _Stacks(means, floats, typed_like(jnp.array(True), like.finite))
