"""What a reducer is, and the door through which all gradients and states enter one.

At the door gradients are checked and taken out of their boxes, weights multiplied in, and a state
is seen as one replica's; behind it a reducer is arithmetic on plain trees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.checks import check_axis_name
from jaxcomp._base.leaves import (
    boxed_as,
    is_floating,
    leaf_name,
    saturated,
    unboxed,
)
from jaxcomp._base.typing import Array, AxisName, KeyPath, PyTree
from jaxcomp._mesh.collectives import mesh_axes, varying, vma_axes
from jaxcomp._mesh.explicit import call_on_automatic_axes, typed_specs
from jaxcomp._mesh.per_replica import has_rows, with_row, without_row
from jaxcomp._mesh.weights import refuse_misspelt_weight, weighted_gradients
from jaxcomp._reducers.transformation import CountBytes, Transformation


class Reduction(NamedTuple):
    """One update of a `Reducer`, with what `error_feedback` needs to know of it."""

    updates: PyTree  # the average, equal on every replica
    state: PyTree  # the new state; `reduce` gives the old one back where `finite` is False
    sent: PyTree  # this replica's own contribution as sent: `updates` is the mean of it
    finite: Array  # bool scalar, equal on every replica: whether all updates are finite


@jax.tree_util.register_static
class Reducer(Transformation):
    """An Optax transformation that also says what this replica contributed to the average.

    Every reducer of this package is one. `error_feedback` calls ``reduce`` instead of ``update``,
    and keeps what was not sent. Gradients that no reducer can take (complex, or already reduced
    over the axis) are refused before `reduce` sees them.

    ``update(..., weight=w)`` makes the average a weighted one, over any reducer: `w` is how much
    this replica counts, a number such as that of the examples in its batch, 0 to sit the step out,
    when the gradients may hold anything. They are multiplied by `w` over the mean weight, which one
    all-reduce of a scalar tells, and then averaged like others. So what is not sent is a share of
    the weighted mean, whatever the weights of later steps.

    Args:
      init: From parameters to a consolidated state. A state of your own is a NamedTuple whose class
        names the fields that differ between replicas, as in ``per_replica = ("momentum",)``, and
        ``()`` if none does: states are placed, saved and found in an optimizer's by that.
      reduce: A function of local gradients, state, parameters or None, and extra arguments by name
        that returns a `Reduction`; updates and sent in any floating dtypes. Where they are not
        finite it gives back the old state, and NaN as updates. It never sees a ``weight``: what it
        gets is weighted.
      axis_name: The mapped axis or axes of the replicas.
      made_by: What ``repr`` shows.
      count_bytes: A function of (params, replicas, step), the last two possibly None, that returns
        `CompressionStats`: the answer of ``bytes``. What has once changed never comes back.

    Example:
      A reducer that averages signs, and keeps the rest for the next step:

      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> from jaxcomp import extend
      >>> def reduce(updates, state, params=None, **extra_args):
      ...     signs = [jnp.sign(g) for g in extend.floating_leaves(updates)]
      ...     reduced = extend.reduce_mean(signs, "data", jnp.float32)
      ...     means, sent = (extend.with_leaves(updates, x) for x in (reduced.means, signs))
      ...     return jaxcomp.Reduction(means, state, sent, reduced.finite)
      >>> signs = jaxcomp.Reducer(lambda params: optax.EmptyState(), reduce, "data")
      >>> tx = jaxcomp.error_feedback(signs)
      >>> grads = {"w": jnp.array([[3.0, -1.0], [0.5, -1.0]])}  # two replicas
      >>> state = tx.init({"w": jnp.zeros(2)})
      >>> mean, state = jax.vmap(tx.update, in_axes=(0, None), axis_name="data")(grads, state)
      >>> mean["w"][0].tolist(), state.residual["w"].tolist()
      ([1.0, -1.0], [[2.0, 0.0], [-0.5, 0.0]])
    """

    reduce: Callable[..., Reduction]
    axis_name: AxisName
    in_phases = True  # exact steps, if any, and after them compressed ones
    _given: tuple[Callable[..., PyTree], Callable[..., Reduction]]

    def __new__(
        cls,
        init: Callable[..., PyTree],
        reduce: Callable[..., Reduction],
        axis_name: AxisName,
        *,
        made_by: str = "",
        count_bytes: CountBytes | None = None,
    ) -> Self:
        """`reduce` behind the door, and an ``update`` made of it."""
        check_axis_name(axis_name)
        unboxed_init = lambda params: init(unboxed(params))  # noqa: E731
        entered = takes_rows(functools.partial(_enter, reduce, axis_name), unboxed_init)

        def update(
            updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
        ) -> tuple[PyTree, PyTree]:
            result = entered(updates, state, params, **extra_args)
            return result.updates, result.state

        self = super().__new__(
            cls,
            unboxed_init,
            update,
            made_by=made_by or f"{cls.__name__}(axis_name={axis_name!r})",
            count_bytes=count_bytes,
        )
        self.reduce, self.axis_name = entered, axis_name
        self._given = init, reduce
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `copy` builds the copy from."""
        _, arguments = super().__getnewargs_ex__()
        return (*self._given, self.axis_name), arguments


def _enter(
    reduce: Callable[..., Reduction],
    axis_name: AxisName,
    updates: PyTree,
    state: PyTree,
    params: PyTree | None = None,
    **extra_args: Any,
) -> Reduction:
    """`reduce` of gradients that it can take, without their boxes, and weighted."""

    def run(
        gradients: PyTree, state: PyTree, params: PyTree, weight: Any, extra: dict[str, Any]
    ) -> Reduction:
        check_gradients(gradients, axis_name)
        averaged = gradients
        if weight is not None:
            averaged = weighted_gradients(gradients, weight, axis_name)
        result = reduce(averaged, state, params, **extra)
        return result._replace(
            updates=_in_dtypes_of(gradients, result.updates),
            sent=_in_dtypes_of(gradients, result.sent),
        )

    weight = extra_args.pop("weight", None)
    refuse_misspelt_weight(extra_args)
    gradients = unboxed(updates)
    if mesh_axes(jax.sharding.AxisType.Explicit):
        # Beside these every operation must say how its result is sharded, which the arithmetic of a
        # reducer cannot know. There the compiler decides meanwhile, and the results are typed as
        # what they replace.
        like, of_state = typed_specs(gradients), typed_specs(state)
        everywhere: Any = jax.sharding.PartitionSpec()
        typed = Reduction(like, of_state, like, everywhere)
        run = functools.partial(call_on_automatic_axes, run, typed)
    result = run(gradients, state, unboxed(params), weight, extra_args)
    means, sent = (boxed_as(x, updates) for x in (result.updates, result.sent))
    return result._replace(updates=means, sent=sent)


def _in_dtypes_of(gradients: PyTree, averages: PyTree) -> PyTree:
    """Returns the averages in the dtypes of the gradients; what carries nothing as it is."""

    def cast(average: Any, gradient: Any) -> Any:
        return saturated(average, gradient.dtype) if is_floating(gradient) else average

    return jax.tree.map(cast, averages, gradients)


def check_gradients(updates: PyTree, axis_name: AxisName) -> None:
    """Refuses what no reducer can average.

    ``float0`` leaves, the gradients of integer parameters, carry nothing and pass. Under
    ``shard_map(check_vma=True)`` the gradient with respect to a replicated parameter arrives summed
    over the axis: reducing it again would put nothing new on the wire and save nothing.

    Raises:
      ValueError: If a leaf is neither floating nor ``float0``, or was already reduced over the
        axis, or the axis is not bound. The message names the leaves.
    """
    axes = vma_axes(axis_name)
    wrong, summed = [], []
    for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            summed += [(path, name) for name in axes if name not in varying(leaf)]
        elif dtype != jax.dtypes.float0:
            wrong.append((path, leaf))
    if wrong:
        raise _not_floating(wrong)
    if summed:
        raise _already_summed(axis_name, *summed[0])


def _not_floating(leaves: Sequence[tuple[KeyPath, Any]]) -> ValueError:
    listed = "; ".join(
        f"{leaf_name(path)} has dtype {leaf.dtype}"
        if hasattr(leaf, "dtype")
        else f"{leaf_name(path)} is a {type(leaf).__name__} and no array"
        for path, leaf in leaves
    )
    return ValueError(
        f"Only floating gradients can be reduced: {listed}. Keep parameters that are "
        "not trained out with optax.masked (of an Equinox module, differentiate "
        "eqx.filter(model, eqx.is_inexact_array)); wrap the chain in "
        "optax.contrib.split_real_and_imaginary for complex ones."
    )


def _already_summed(axis_name: AxisName, path: KeyPath, axis: str) -> ValueError:
    return ValueError(
        f"The gradient {leaf_name(path)} is the same on every replica along {axis!r}: it was "
        "already summed, by jax.grad inside shard_map(check_vma=True) or a pmean of your own, so "
        "there is nothing left to reduce. Leave the pmean out, or take the gradient with "
        f"jaxcomp.local_value_and_grad(loss, {axis_name!r}), or mark the parameters with "
        f"jax.lax.pcast(params, {axis_name!r}, to='varying') before jax.grad."
    )


def takes_rows(update: Callable[..., Any], init: Callable[[PyTree], PyTree]) -> Callable[..., Any]:
    """The same update, also of a state whose per-replica leaves are rows ``(1, *leaf)``.

    So `jax.shard_map` hands a state over that is mapped by `state_specs`. What comes out has rows
    where what went in had them. A state with an owner of its own shows it; any other is searched
    for owners, or compared with a fresh one.

    Args:
      update: An Optax update, for per-replica leaves of the shapes that `init` gives them. It
        returns updates and state, or a `Reduction`.
      init: From parameters to a state, to tell rows by where no class in the state has an owner.
    """

    def run(updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any) -> Any:
        fresh = lambda: init(updates if params is None else params)  # noqa: E731
        owned = "owner" in getattr(type(state), "per_replica", ())
        if not (np.ndim(state.owner) if owned else has_rows(state, fresh)):
            return update(updates, state, params, **extra)
        result = update(updates, without_row(state), params, **extra)
        if hasattr(result, "_replace"):
            return result._replace(state=with_row(result.state))
        outputs, new = result
        return outputs, with_row(new)

    return run


def fitted(
    kind: type,
    state: Any,
    updates: PyTree,
    shapes: Mapping[str, Sequence[tuple[int, ...] | None]],
) -> dict[str, list[Any]]:
    """The leaves of fields of a state, by name, in the order of the gradients.

    Args:
      kind: The state's class.
      state: What the user passed.
      updates: The gradients.
      shapes: Of each field that is a tree like the gradients the shapes of its leaves; None where a
        leaf has nothing and the field an `optax.MaskedNode`.

    Raises:
      ValueError: If it is another class; listing every leaf that only one of the trees has, or
        whose shape is off.
    """
    if not isinstance(state, kind):
        raise other_state("The reducer", kind.__name__, state)
    paths, treedef = jax.tree_util.tree_flatten_with_path(updates)
    found, wrong = {}, []
    for field, expected in shapes.items():
        try:
            found[field] = treedef.flatten_up_to(getattr(state, field))
        except ValueError as error:
            raise _other_leaves(kind, field, updates, state) from error
        held = (None if isinstance(x, optax.MaskedNode) else np.shape(x) for x in found[field])
        each = zip(paths, expected, held, strict=True)
        wrong += [(field, path, want, shape) for (path, _), want, shape in each if want != shape]
    if wrong:
        raise _other_shapes(kind, wrong)
    return found


def _other_shapes(kind: type, wrong: Sequence[tuple[str, KeyPath, Any, Any]]) -> ValueError:
    hint = "make a new state."
    if hasattr(kind, "q"):
        hint = (
            "use the rank, matrix_dims, error_feedback and warm_start that it was made with, or "
            "jaxcomp.adapt_state."
        )
    if "residual" in {field for field, *_ in wrong}:
        hint = (
            "place it with jaxcomp.shard_state and map it with jaxcomp.state_specs, if a residual "
            f"has an axis of replicas too many or lacks one; otherwise {hint}"
        )
    shown = lambda shape: "none" if shape is None else shape  # noqa: E731
    listed = "\n  ".join(
        f"{field}{leaf_name(path)}: expected {shown(want)}, got {shown(shape)}"
        for field, path, want, shape in wrong
    )
    return ValueError(
        f"The {kind.__name__} does not fit these gradients and arguments:\n  {listed}\n"
        f"{hint[0].upper()}{hint[1:]}"
    )


def _other_leaves(kind: type, field: str, updates: PyTree, state: Any) -> ValueError:
    """The refusal of a tree that has not the gradients' leaves, which it names."""

    def names(tree: PyTree) -> list[str]:
        masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
        return [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree, masked)]

    want, have = names(updates), names(getattr(state, field))
    only = [f"only among the gradients {name}" for name in want if name not in have]
    only += [f"only in the state {name}" for name in have if name not in want]
    return ValueError(
        f"The gradients and the {kind.__name__}'s {field} have different tree structures: "
        f"{', '.join(only) or 'the same leaves in other containers'}. Make the state with init() "
        "of a tree like the gradients."
    )


def other_state(reducer: str, kind: str, state: PyTree) -> ValueError:
    """The refusal of a state that is not this reducer's own."""
    return ValueError(
        f"{reducer}'s update needs its own {kind}, got {type(state).__name__}. Inside an "
        "optax.chain the chain's update takes the chain's state; jaxcomp.adapt_state turns another "
        "reducer's into this one's."
    )
