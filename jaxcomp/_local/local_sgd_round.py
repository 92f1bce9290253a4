"""Local SGD one round at a time: local steps in scans, averages between the scans.

A round knows its parameters before and after, so it sets them to the average exactly, where
`local_sgd` can only return an update towards it. Between rounds the parameters are equal on all
replicas and serve as the anchor. With several fragments the round is cut into scans at the steps
where a fragment is averaged; replicas then differ after the round, and the state keeps each one's
own parameters. `local_sgd_round` checks its arguments and makes a `LocalSGDRound`, with one `Sync`
for each fragment, because each may have an outer optimizer of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp._base.checks import (
    answers_other_names,
    check_axis_name,
    check_function,
    check_int,
)
from jaxcomp._base.leaves import floating_leaves, leaf_name, named_dtype, with_leaves
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import AxisName, KeyPath, PyTree, Shape
from jaxcomp._local.fragments import Streaming, check_streaming, numbered, part_of, put_back
from jaxcomp._local.sync import (
    AverageInnerState,
    InnerInit,
    LocalSGDState,
    Sync,
    check_sync,
    payload,
)
from jaxcomp._mesh.collectives import as_local, axis_tuple, is_bound, owner_id
from jaxcomp._mesh.meshes import check_mesh_axes, explicit_inside, replicas_on, typed_specs
from jaxcomp._mesh.per_replica import has_replica_axis, with_replica_axis, without_replica_axis
from jaxcomp._reducers.transformation import Counted, shows_its_call
from jaxcomp._states.place import shard_state
from jaxcomp._training.arguments import Inputs, check_keys, is_raw_key, is_shared, split_spec
from jaxcomp._training.on_mesh import call_on_replicas, check_params, the_mesh
from jaxcomp._training.outputs import as_array, one_level

# (params, inner state, batch) -> (params, inner state, auxiliary)
StepFn: TypeAlias = Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree, Any]]


@dataclasses.dataclass(frozen=True, repr=False)
class LocalSGDRound(Counted):
    """Runs a round of local SGD when it is called; `local_sgd_round` makes such an object."""

    step_fn: StepFn
    sync_every: int  # local steps in a round
    axis_name: AxisName
    streaming: Streaming
    syncs: tuple[Sync, ...]  # one for each fragment
    inner_init: InnerInit | None
    mesh: Mesh | None = None
    # Not an argument, so `dataclasses.replace` gives a copy a dictionary of its own.
    compiled: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False, compare=False)

    @answers_other_names
    def init(self, params: PyTree, inner_state: PyTree = None) -> LocalSGDState:
        """Makes the state before the first round.

        Args:
          params: The parameters.
          inner_state: The second argument of `step_fn`; None takes ``inner_init(params)``.

        Raises:
          ValueError: If there is neither `inner_state` nor `inner_init`, or a leaf is complex.
        """
        if inner_state is None:
            if self.inner_init is None:
                raise ValueError(
                    "There is no inner state. Pass run.init(params, optimizer.init(params)), with "
                    "() for a step that keeps none, or make the round with "
                    "inner_init=optimizer.init."
                )
            inner_state = self.inner_init(params)
        numbers = numbered(params, self.streaming.split)
        states = []
        for number, sync in enumerate(self.syncs):
            states.append(sync.init(part_of(params, numbers, number)))
        outer, reducer = zip(*states, strict=True)
        local = ()
        if self.streaming.keeps_local:
            local = part_of(params, numbers)
        # No anchor in the state: between rounds the parameters are the anchor.
        state = LocalSGDState.first(
            self.axis_name, inner_state, local, anchor=(), outer=outer, reducer=reducer
        )
        if self.mesh is None or is_bound(self.axis_name):
            return state
        check_params(params, self.mesh, axis_tuple(self.axis_name))
        return shard_state(state, self.mesh, self.axis_name)

    @answers_other_names
    def __call__(
        self, params: PyTree, state: LocalSGDState, batches: Any, *, weight: Any = None
    ) -> tuple[PyTree, LocalSGDState, Any]:
        """Runs one round; call it inside the mapped function, or on a mesh inside `jax.jit`.

        Args:
          params: The parameters, equal on every replica.
          state: The state from `init` or from the last round.
          batches: This replica's batches, each leaf with a leading axis of `sync_every`. With a
            `mesh`, the batches of all replicas: the second axis is split between the replicas.
          weight: This replica's weight in the averages, a number; with 0 the replica is ignored.
            With a `mesh`, an array of all replicas' weights, of shape (replicas,). None if all
            replicas have the same weight.

        Returns:
          ``(params, state, auxiliary)``: the parameters, equal on every replica; the state; and
          this replica's auxiliary outputs of `step_fn`, stacked over the steps. With a `mesh`,
          auxiliary outputs have a leading axis of replicas.

        Raises:
          ValueError: If a leaf of `batches` has another leading axis, `step_fn` does not return
            three values, or the axis is not bound.
        """
        if not isinstance(state, LocalSGDState):
            raise ValueError(
                "Call a round as (params, state, batches), with the LocalSGDState that init or the "
                f"last round returned. The second argument is a {type(state).__name__}."
            )
        # Refuses other objects than arrays.
        jax.tree.map_with_path(named_dtype, {"params": params, "batches": batches})
        for path, leaf in jax.tree.leaves_with_path(batches):
            if np.shape(leaf)[:1] != (self.sync_every,):
                raise ValueError(
                    f"The batches' leaf {leaf_name(path)} has shape {np.shape(leaf)}; a round of "
                    f"sync_every={self.sync_every} steps needs a leading axis of that length, one "
                    "batch for each step."
                )
        if is_bound(self.axis_name):
            return self._on_replica(params, state, batches, weight)
        mesh = the_mesh(self.mesh, self.axis_name, state)
        return self._on_mesh(mesh, params, state, batches, weight)

    def _on_mesh(
        self, mesh: Any, params: PyTree, state: LocalSGDState, batches: Any, weight: Any
    ) -> tuple[PyTree, LocalSGDState, Any]:
        """Runs the round on every replica of a mesh."""
        axis_name = self.axis_name
        axes = axis_tuple(axis_name)
        # Arrays of NumPy have no types to read specs from.
        params, state, batches = jax.tree.map(jnp.asarray, (params, state, batches))
        # A step gets one replica's state without the replica axis, and one batch.
        rows = typed_specs((state.inner, batches))
        of_a_step = jax.tree.map(lambda spec: P(*spec[1:]), rows)
        step_specs = (typed_specs(params), *of_a_step)

        keys: dict[str, Any] = {}
        lengths: set[int] = set()  # numbers of examples in a step

        def batch_spec(path: KeyPath, leaf: Any) -> P:
            name = f"{leaf_name(path)} of the batches"
            of_step = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
            if is_raw_key(of_step):
                keys[name] = of_step
            if is_shared(of_step):  # one value or key for each step, the same on all replicas
                return P()
            lengths.add(leaf.shape[1])
            return split_spec(name, leaf, P(None, axis_name), axis_name, replicas_on(mesh, axes))

        specs = jax.tree.map_with_path(batch_spec, batches)
        check_keys(keys, lengths)

        step = explicit_inside(lambda arrays: self.step_fn(*arrays), step_specs, mesh, axes)
        inside = dataclasses.replace(self, step_fn=lambda *arrays: step(arrays))

        def on_replica(state: PyTree, arrays: Any, weight: Any) -> Any:
            params, state, auxiliary = inside._on_replica(arrays[0], state, arrays[1], weight)
            auxiliary = as_local(jax.tree.map(jnp.asarray, auxiliary), axis_name)
            return None, jax.tree.map(lambda leaf: leaf[None], auxiliary), params, state

        _, auxiliary, params, state = call_on_replicas(
            on_replica,
            state,
            (params, batches),
            weight,
            inputs=Inputs((), [0], (P(), specs), {}),
            params=params,
            mesh=mesh,
            axis_name=axis_name,
            state_axis=axis_name,
            compiled=self.compiled,
        )
        return params, state, auxiliary

    def _on_replica(
        self, params: PyTree, state: LocalSGDState, batches: Any, weight: Any
    ) -> tuple[PyTree, LocalSGDState, Any]:
        """Runs the round of one replica; its state may have the axis that shard_map leaves."""
        has_axis = has_replica_axis(state)
        if has_axis:
            state = without_replica_axis(state)
        streaming = self.streaming
        numbers = numbered(params, streaming.split)
        auxiliary: list[Any] = []  # auxiliary outputs of the steps, in pieces

        def steps(carry: Any, begin: int, end: int, *, unroll: bool = False) -> Any:
            if begin == end:  # without a delay no step lies between an average and its use
                return carry
            piece = jax.tree.map(lambda leaf: leaf[begin:end], batches)
            carry = self._marked(*carry)
            carry, others = lax.scan(self._step, carry, piece, end - begin, unroll=unroll)
            auxiliary.append(others)
            return carry

        local = params
        if streaming.keeps_local:
            local = put_back(state.local, params)
        inner = state.inner
        shared = params
        outer = list(state.outer)  # one for each fragment
        reducers = list(state.reducer)
        begin = 0
        for number, end in enumerate(streaming.ends):
            sent = end - streaming.delay
            local, inner = steps((local, inner), begin, sent)
            before = state._replace(
                inner=inner,
                anchor=part_of(params, numbers, number),
                outer=outer[number],
                reducer=reducers[number],
            )
            part = part_of(local, numbers, number)
            average, after = self.syncs[number].step(
                part, before, self.inner_init, local, weight, self.axis_name
            )
            # With a delay these steps may run during the collective, because they do not depend on
            # it. They are unrolled: XLA does not know how long a loop takes, and may wait before
            # it.
            local, inner = steps((local, after.inner), sent, end, unroll=True)
            kept = streaming.mix(average, part_of(local, numbers, number))
            local = put_back(kept, local)
            # With a fraction of their own, replicas go on from mixtures; what all share is the
            # averages.
            shared = put_back(average, shared)
            outer[number] = after.outer
            reducers[number] = after.reducer
            begin = end
        # Leaves that are not floating are in no fragment, and come from the last step.
        shared = put_back(part_of(shared, numbers), local)

        kept = ()
        if streaming.keeps_local:
            kept = part_of(local, numbers)
        inner, kept = as_local((inner, kept), self.axis_name)
        count = state.count + self.sync_every
        state = state._replace(
            count=count,
            last_sync=count,
            inner=inner,
            outer=tuple(outer),
            reducer=tuple(reducers),
            local=kept,
            owner=owner_id(self.axis_name),
        )
        auxiliary = jax.tree.map(lambda *pieces: jnp.concatenate(pieces), *auxiliary)
        if has_axis:
            state = with_replica_axis(state)
        return shared, state, auxiliary

    def _step(self, carry: Any, batch: Any) -> tuple[Any, Any]:
        """Takes one local step, as the body of a scan that carries parameters and inner state."""
        params, inner = carry
        result = self.step_fn(params, inner, batch)
        in_three = isinstance(result, tuple) and len(result) == 3
        if not in_three or _types_of(result[:2]) != _types_of(carry):
            raise ValueError(
                "`step_fn` must return a tuple (params, inner_state, auxiliary). The first two "
                "must have the structure and shapes of its arguments. Return None as the third if "
                f"there are no auxiliary outputs. It got {one_level(carry)} and returned "
                f"{one_level(result)}."
            )
        params, inner, auxiliary = result
        auxiliary = jax.tree.map_with_path(as_array, auxiliary)
        # A step may return a constant, whose replicated type would change the type of the carry.
        return self._marked(params, inner), auxiliary

    def _marked(self, params: PyTree, inner: PyTree) -> tuple[PyTree, PyTree]:
        """Marks floating parameters and the inner state as this replica's own."""
        # Other parameters are not averaged, so they stay replicated.
        floating, inner = as_local((floating_leaves(params), inner), self.axis_name)
        return with_leaves(params, floating), inner

    def count_bytes(
        self, params: PyTree, replicas: int | None, step: int | None
    ) -> CompressionStats:
        """Counts the bytes of a local step, numbered over all rounds; see ``bytes``."""
        numbers = numbered(params, self.streaming.split)
        nth = place = None
        if step is not None:
            nth, place = divmod(step, self.sync_every)
        parts = []
        for number, end in enumerate(self.streaming.ends):
            # Sent after the step that is `delay` before the end; steps are counted from 0.
            if place in (None, end - self.streaming.delay - 1):
                part = part_of(params, numbers, number)
                sync = self.syncs[number]
                parts.append(sync.bytes(part, replicas, nth, self.inner_init, params))
        sent = payload(params, parts)
        if step is None:
            return sent.scaled(1 / self.sync_every)
        return sent


@shows_its_call
def local_sgd_round(
    step_fn: StepFn,
    *,
    sync_every: int,
    axis_name: AxisName,
    reducer: optax.GradientTransformation | None = None,
    outer: optax.GradientTransformation | Sequence[optax.GradientTransformation] | None = None,
    average_inner_state: AverageInnerState = False,
    fragments: int | Sequence[str] = 1,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
    drop_non_finite: bool = False,
    inner_init: InnerInit | None = None,
    mesh: Mesh | None = None,
) -> LocalSGDRound:
    r"""Makes a round of local SGD or DiLoCo from an ordinary single-device training step.

    .. math::
        p_w^{0} = p, \qquad p_w^{h+1} = \mathrm{step}(p_w^{h}), \qquad
        p \leftarrow \frac{1}{W} \sum_w p_w^{H}
        \quad\text{or}\quad p + \mathrm{outer}\Big(\frac{1}{W} \sum_w (p - p_w^{H})\Big)

    `step_fn` is a step for one device: ``jax.grad``, ``optimizer.update``, ``optax.apply_updates``,
    and no collective. The average at the end *sets* the parameters, so they are equal on all
    replicas bit for bit; under ``shard_map(check_vma=True)`` pass and return them with ``P()``.
    Between rounds there is one copy of the parameters, to evaluate and to save. The state does not
    depend on `sync_every`, so rounds of several lengths can share it if the period changes.

    Streaming DiLoCo averages one fragment of the parameters at a time. With a delay :math:`\tau`, a
    fraction :math:`\alpha` and the anchor :math:`a`, a fragment whose average is used after step
    :math:`t` is updated by

    .. math::
        a &\leftarrow a + \mathrm{outer}\Big(\frac{1}{W} \sum_v (a - p_v^{t - \tau})\Big)
            && \text{(after step } t - \tau \text{)} \\
        p_w^t &\leftarrow (1 - \alpha)\, a + \alpha\, p_w^t && \text{(after step } t \text{)}

    The round is one program. An average does not depend on the steps until it is used, so the
    compiler may run both at the same time. Compiling takes longer, because these steps are
    unrolled. With several fragments or a positive fraction, `params` are the anchor, one copy, and
    the state also holds each replica's own parameters.

    Args:
      step_fn: ``(params, inner_state, batch) -> (params, inner_state, auxiliary)``.
      sync_every: Number of local steps in a round.
      axis_name: The mapped axis (or axes) along which the replicas lie.
      reducer: A jaxcomp reducer for the pseudo-gradients, as in `local_sgd`.
      outer: An Optax optimizer of the pseudo-gradients, as in `local_sgd`, with one state for each
        fragment; or a list with one optimizer for each fragment.
      average_inner_state: As in `local_sgd`. Without an outer optimizer, BatchNorm statistics and
        other floating arrays that shall always be averaged can be part of `params`.
      fragments: Average one fragment of the leaves at a time. The total bytes are the same, and the
        peak is lower by the number of fragments. Pass a number, for fragments of about equal size;
        or a list of regular expressions: a leaf belongs to the first one that is found in its path,
        written ``blocks/0/kernel``. The average of fragment ``k`` of ``n``, counted from 1, is used
        after ``k * sync_every // n`` steps.
      fragment_sync_delay: Number of steps between the average of a fragment and its use, less than
        ``sync_every // fragments``.
      fragment_update_alpha: Fraction, from 0 to 1, of its own parameters that a replica keeps when
        it uses the average of a fragment.
      drop_non_finite: Ignore a replica in an average if it would contribute a value that is not
        finite. The replica continues with the mean of the others, and its inner state is reset with
        `inner_init`, which is then required. If no replica is left, the mean is NaN.
      inner_init: ``params -> inner_state``, the inner optimizer's ``init``. It is required if inner
        states may be reset; `LocalSGDRound.init` uses it as a default.
      mesh: The mesh of the replicas, for a loop in `jax.jit` over sharded arrays. The round then
        maps itself over `axis_name`, with Auto or Explicit axes, and per-replica leaves are global
        arrays with a leading axis of replicas. None takes the mesh of `jax.set_mesh`, else that of
        the state's arrays; place the state with `shard_state` then.

    Returns:
      A `LocalSGDRound`: ``init(params, inner_state)`` returns a `LocalSGDState`, and a call
      ``(params, state, batches)``, inside the mapped function, returns
      ``(params, state, auxiliary)``. With a `mesh` call it inside `jax.jit` instead.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> optimizer = optax.sgd(0.5)
      >>> def step(params, opt_state, batch):  # nothing here knows of replicas
      ...     loss, grads = jax.value_and_grad(lambda p: ((p - batch) ** 2 / 2).sum())(params)
      ...     updates, opt_state = optimizer.update(grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state, loss
      >>> run = jaxcomp.local_sgd_round(step, sync_every=2, axis_name="data")
      >>> params = jnp.zeros(3)
      >>> state = run.init(params, optimizer.init(params))
      >>> batches = jnp.array([[0.0, 0.0], [16.0, 16.0]])  # two replicas, two steps
      >>> params, state, losses = jax.vmap(run, in_axes=(None, None, 0), axis_name="data")(
      ...     params, state, batches)
      >>> params.tolist()
      [[6.0, 6.0, 6.0], [6.0, 6.0, 6.0]]

      Streaming DiLoCo: the parameters after the first step are averaged while the second step runs.

      >>> run = jaxcomp.local_sgd_round(
      ...     step, sync_every=2, axis_name="data", fragment_sync_delay=1)
      >>> params, state, losses = jax.vmap(run, in_axes=(None, None, 0), axis_name="data")(
      ...     jnp.zeros(3), run.init(jnp.zeros(3), optimizer.init(jnp.zeros(3))), batches)
      >>> params[0].tolist()
      [4.0, 4.0, 4.0]

    References:
      Those of `local_sgd`.
      Douillard et al.: Streaming DiLoCo with Overlapping Communication. 2025.
    """
    check_axis_name(axis_name)
    length = check_int("sync_every", sync_every, 1)
    streaming = check_streaming(fragments, fragment_sync_delay, fragment_update_alpha, length)
    fragment_count = len(streaming.ends)
    optimizers: Any = outer  # one for each fragment
    if type(outer) not in (list, tuple):  # an optimizer is a named tuple
        optimizers = [outer] * fragment_count
    elif len(optimizers) != fragment_count or None in optimizers:
        raise ValueError(
            f"`outer` has {len(optimizers)} optimizers for {fragment_count} fragments, or None in "
            "its list. Pass one for each, in the order of `fragments`, with optax.sgd(1.0) for a "
            "fragment that takes the mean itself; or a single optimizer for all."
        )
    syncs = []
    for optimizer in optimizers:
        syncs.append(
            check_sync(axis_name, reducer, optimizer, average_inner_state, drop_non_finite)
        )
    in_parts = streaming.delay or len(syncs) > 1
    if in_parts and (average_inner_state is not False or drop_non_finite):
        raise ValueError(
            f"average_inner_state={average_inner_state!r} and drop_non_finite={drop_non_finite!r} "
            "need fragments=1 and fragment_sync_delay=0: an inner state belongs to all parameters "
            "together, and a value that is not finite spreads from one fragment to the others."
        )
    check_function("step_fn", step_fn, "params", "inner_state", "batch")
    check_function("inner_init", inner_init, "params", otherwise=" or None")
    anew = ""  # the argument that makes a fresh inner state necessary
    if average_inner_state == "reset":
        anew = "average_inner_state='reset'"
    if drop_non_finite:
        anew = "drop_non_finite=True"
    if anew and inner_init is None:
        raise ValueError(
            f"{anew} needs `inner_init`, the inner optimizer's init: inner_init=optimizer.init."
        )
    if mesh is not None:
        check_mesh_axes(mesh, axis_name)
    return LocalSGDRound(step_fn, length, axis_name, streaming, tuple(syncs), inner_init, mesh)


def _types_of(tree: PyTree) -> tuple[Any, list[Shape]]:
    shapes = list(map(np.shape, jax.tree.leaves(tree)))
    return jax.tree.structure(tree), shapes
