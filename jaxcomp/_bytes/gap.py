"""Predicts how much loss a rank costs, from the momentum of an exact run or before any run.

There are two laws, both fitted to recorded runs. `TailLaw` reads the momentum of an exact run.
Compression sends the part beyond the rank late; the law uses the size of this part, and neither
width nor batch. The gap that was measured with one rank takes the place of its constant. `Law`
predicts before a run, from width and tokens, and is less certain. `predict_gap` and
`ranks_by_spectrum` use the first, `advise` either.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcomp._base.checks import answers_other_names
from jaxcomp._base.leaves import check_values, is_masked, leaf_name, unboxed
from jaxcomp._base.typing import MatrixDimsFn, PyTree, RankFn
from jaxcomp._bytes.units import parse
from jaxcomp._lowrank.matrices import plan_leaves

_EPS = 1e-8  # as in Adam, added to the square root of the second moment
_MUON = "ns_coeffs"  # a field that only Muon's state has
_MOMENTA = {"mu", "trace", "ema"}  # fields: of Adam, Muon and Lion; of SGD; of Adafactor
_BESIDE_MU = {"nu", _MUON}  # fields that only optimizers with a law of their own have
Measured = tuple[int | RankFn, str | float]  # a rank that was run, and how far above exact it ended


class Gap(NamedTuple):
    """Predicts how far a compressed run's loss ends above an exact run's; all are fractions."""

    gap: float  # 0.01 is 1% of the held-out loss
    half_width: float  # the loss ends at most this far above `gap`, with 95% probability
    tail: float  # fraction of the momentum's energy that the ranks leave out

    def __str__(self) -> str:
        """Returns one line, in per cent of the exact run's loss and of the momentum's energy."""
        return (
            f"gap {self.gap:.2%}, at most {self.gap + self.half_width:.2%} with 95% probability; "
            f"tail {self.tail:.1%}"
        )


# Most means over eight seeds have at most this uncertainty, below which nothing is known.
_LEAST_HALF_WIDTH = 0.002


def _half_width(gap: float, error: float) -> float:
    """Returns how far above a predicted gap the true one lies at most in 95% of the cases."""
    # The error is that of log(gap), and two standard deviations hold 95%.
    return max((math.exp(2 * error) - 1) * gap, _LEAST_HALF_WIDTH)


@dataclasses.dataclass(frozen=True)
class TailLaw:
    r"""Computes the gap as a power of the tail, fitted to recorded runs with one optimizer.

    .. math::
        \mathrm{gap} = c\, \mathrm{tail}^{\,p}

    in per cent of the held-out loss. ``python -m benchmarks.optimizers --tail`` fits it again.
    """

    ranks: int  # number of fitted ranks, in models with several batches and texts
    tails: tuple[float, float]  # smallest and largest tail of these ranks
    c: float  # per cent
    power: float
    error: float  # root mean square error of log(gap), in settings predicted before they ran

    def gap(self, tail: float) -> float:
        """Returns the expected gap as a fraction."""
        return self.c * tail**self.power / 100

    def half_width(self, tail: float) -> float:
        """Returns how far above the expected gap 95% of the settings lie at most, as a fraction."""
        return _half_width(self.gap(tail), self.error)

    def through(self, tail: float, gap: float) -> TailLaw:
        """Returns the law with the same power that has this gap, which was measured, at a tail.

        The constant comes from the measured run, so the law holds for all tails, and its error is
        that of predictions from a measured gap.
        """
        constant = 100 * gap / tail**self.power
        return dataclasses.replace(self, tails=(0.0, 1.0), c=constant, error=_ERROR_IF_MEASURED)

    def largest_tail(self, gap: float) -> float:
        """Returns the largest tail whose expected gap is at most `gap` (a fraction)."""
        return (100 * gap / self.c) ** (1 / self.power)


# Root mean square error of log(gap), if the gap of another rank was measured in the same setting.
_ERROR_IF_MEASURED = 0.21
# python -m benchmarks.optimizers --tail
TAIL_LAWS = {
    "adamw": TailLaw(16, (0.045, 0.417), c=22.9, power=1.34, error=0.67),
    "muon": TailLaw(4, (0.058, 0.473), c=48.4, power=1.22, error=0.67),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Momentum:
    """Holds an optimizer's momentum, and its energy along each singular direction."""

    law: TailLaw
    tree: PyTree  # steps such as mu / sqrt(nu); MaskedNode where no optimizer has a moment
    spectra: Mapping[str, np.ndarray]  # squared singular values of each leaf, largest first

    def tail(self, ranks: Mapping[str, int]) -> float:
        """Returns the fraction of the energy that the ranks leave out (0 without a rank)."""
        beyond = 0.0
        for name, rank in ranks.items():
            beyond += self.spectra[name][rank:].sum()
        return float(beyond / self.energy)

    @functools.cached_property
    def energy(self) -> float:
        """Adds up the energy of all directions."""
        return sum(energy.sum() for energy in self.spectra.values())

    def gap(self, ranks: Mapping[str, int]) -> Gap:
        """Returns the expected cost in loss of these ranks."""
        tail = self.tail(ranks)
        return Gap(self.law.gap(tail), self.law.half_width(tail), tail)

    def through(self, ranks: Mapping[str, int], gap: float) -> Momentum:
        """Returns the same momentum, with a law that has this gap, which was measured, at ranks.

        Raises:
          ValueError: If the ranks leave out nothing, so that the gap says nothing about others.
        """
        tail = self.tail(ranks)
        if tail == 0:
            raise ValueError(
                "The rank in `measured` leaves out nothing, so it shows no cost. Measure a lower "
                "rank."
            )
        return dataclasses.replace(self, law=self.law.through(tail, gap))


@answers_other_names
def predict_gap(
    opt_state: PyTree,
    rank: int | RankFn,
    *,
    measured: Measured | None = None,
    min_compression_rate: float = 2.0,
    matrix_dims: MatrixDimsFn | None = None,
) -> Gap:
    r"""Predicts from an exact run how far above its loss a compressed run would end.

    A step of Adam is :math:`u = \mu / \sqrt{\nu}`, with its two moments. The tail is the fraction
    of the step's energy that the ranks leave out, over all leaves that are matrices,

    .. math::
        \mathrm{tail} = \frac{\sum_l \sum_{k > r_l} \sigma_k(u_l)^2}{\sum_l |u_l|^2}, \qquad
        \mathrm{gap} = c\, \mathrm{tail}^{\,p},

    with singular values :math:`\sigma_k`. For other depths, contexts and kinds of model than those
    of the fit, the constant :math:`c` was wrong by factors of up to four. The power :math:`p` was
    not: pass what you `measured` with one rank, and :math:`c` follows from it.

    The gap is that of the held-out loss at the end of training, for `powersgd` with factors in six
    bits or more from the first step on. For a leaf that Muon or Lion trains, :math:`u` is its
    momentum divided by the momentum's root mean square; for SGD and Adafactor it is the momentum.
    docs/choosing.md lists the runs that the two coefficients of each optimizer were fitted to.

    Args:
      opt_state: The state of an optimizer with moments ``mu`` and ``nu`` (adam, adamw, nadam and
        the like), or of ``optax.contrib.muon``: alone, in a chain, masked, injected, or in a whole
        ``TrainState``. With `measured` also that of ``optax.sgd`` or ``optax.adafactor`` with a
        momentum, or of ``optax.lion``. Take it from an *exact* run, after a quarter to a half of
        its steps. Leaves without such a moment (frozen ones, for example) are ignored. If Adam or
        Muon trains some leaves, those that another optimizer trains are ignored too.
      rank: A rank for all leaves, or a function of (key path, leaf), as for `powersgd`; for example
        the result of `ranks_by_spectrum`.
      measured: The rank of a compressed run of this model, as for `rank`, and its gap: how far its
        held-out loss lay above that of the exact run at the same step, as a fraction or as
        ``"1.2%"``. Three quarters of both runs are enough, with the schedule of whole runs.
      min_compression_rate: The least compression rate of a leaf, as for `powersgd`.
      matrix_dims: The function that views leaves as matrices, as for `powersgd`.

    Returns:
      The gap, the half-width of its 95% interval, and the tail. The fit used means of three states
      from the second quarter of a run; the gap from one state differs from that mean by up to a
      quarter. The fitted runs had tails from about 0.05 to 0.4.

    Raises:
      ValueError: If the state has no such moments, the moments are zero or not finite, or an
        argument is unusable.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> params = {"w": jnp.zeros((64, 96))}
      >>> grads = {"w": jax.random.normal(jax.random.key(0), (64, 96))}
      >>> optimizer = optax.adam(1e-3)
      >>> _, opt_state = optimizer.update(grads, optimizer.init(params))
      >>> low, high = (jaxcomp.predict_gap(opt_state, rank) for rank in (2, 16))
      >>> low.gap > high.gap > 0  # pure noise has a long tail
      True
    """
    momentum = read_momentum(opt_state, matrix_dims, measured, min_compression_rate)
    return momentum.gap(ranks_of(momentum.tree, rank, min_compression_rate, matrix_dims))


def ranks_of(
    tree: PyTree, rank: int | RankFn, min_compression_rate: float, matrix_dims: MatrixDimsFn | None
) -> dict[str, int]:
    """Returns the rank of each compressed leaf, by its path."""
    ranks = {}
    for plan in plan_leaves(tree, rank, min_compression_rate, matrix_dims):
        if plan.view is not None:
            ranks[plan.path] = plan.rank
    return ranks


def read_momentum(
    opt_state: PyTree,
    matrix_dims: MatrixDimsFn | None = None,
    measured: Measured | None = None,
    min_compression_rate: float = 2.0,
) -> Momentum:
    """Finds the momentum in an optimizer's state, its singular values, and the law of its tail.

    Args:
      opt_state: As for `predict_gap`.
      matrix_dims: As for `predict_gap`.
      measured: As for `predict_gap`; an optimizer without a law of its own needs it.
      min_compression_rate: Of the measured run.

    Raises:
      ValueError: If the state has no momentum or several of a leaf, the momentum is zero or not
        finite, or its optimizer has no law and nothing was measured.
    """
    nodes = jax.tree.leaves_with_path(opt_state, is_leaf=lambda node: bool(_moments(node)))
    states = []
    for path, node in nodes:
        fields = _moments(node)
        if fields:
            # Only what is read: residuals beside it may have parts in other processes.
            check_values("opt_state", node, path, on_host=True)
            states.append(fields)
    with_law = [fields for fields in states if fields.keys() & _BESIDE_MU]
    if not states:
        raise ValueError(
            "`opt_state` holds no momentum. Pass the state of adam, adamw or the like, or of "
            "optax.contrib.muon; with measured=(rank, gap) also that of sgd with a momentum, lion, "
            "or adafactor with a momentum."
        )
    if not with_law and measured is None:
        raise ValueError(
            "`opt_state` is that of sgd, lion, adafactor or the like, for which no law is known. "
            "Also run this model compressed, and pass the rank and how far above the exact loss "
            "that run ended: measured=(16, '1.2%')."
        )
    for fields in states:
        if _has_leading_axis(fields):
            raise ValueError(
                "`opt_state` is that of several replicas or models: its counter has an axis. Pass "
                "that of one: jaxcomp.consolidate(opt_state), or without a jaxcomp state in it "
                "jax.tree.map(lambda x: x[0], opt_state)."
            )
    # With several optimizers, each leaf belongs to one of them and is masked for the others.
    tree = unboxed(_merged(list(map(_steps, with_law or states))))
    law = "adamw"
    if any(_MUON in fields for fields in with_law):
        law = "muon"
    momentum = Momentum(TAIL_LAWS[law], tree, spectra_of(tree, matrix_dims))
    if not momentum.spectra:
        raise ValueError(
            "The momentum in `opt_state` has no matrices. If the optimizer is in optax.flatten, "
            "where it has one vector, train the exact run without it."
        )
    if not momentum.energy > 0:
        raise ValueError(
            "The momentum in `opt_state` is zero. Train a quarter of an exact run first, and pass "
            "its state."
        )
    if measured is None:
        return momentum
    if not isinstance(measured, tuple) or len(measured) != 2:
        raise ValueError(
            "`measured` must be a rank and how far above the exact run's loss it ended, as in "
            f"measured=(16, '1.2%'), got {measured!r}."
        )
    rank, gap = measured
    ranks = ranks_of(tree, rank, min_compression_rate, matrix_dims)
    return momentum.through(ranks, parse("measured", gap))


def spectra_of(tree: PyTree, matrix_dims: MatrixDimsFn | None) -> dict[str, np.ndarray]:
    """Returns the squared singular values of each matrix, largest first, summed over its batch.

    Raises:
      ValueError: If a leaf is not finite.
    """
    spectra = {}
    plans = plan_leaves(tree, 1, 0.0, matrix_dims)  # a rate of 0 compresses every matrix
    leaves = jax.tree.leaves_with_path(tree)
    for plan, (path, leaf) in zip(plans, leaves, strict=True):
        if plan.view is None:
            continue
        # NumPy in float64: JAX has no float64 by default, and a spectrum spans many orders.
        on_host: Any = np.asarray(leaf)
        matrices = np.asarray(plan.view.matricize(on_host), np.float64)
        if not np.isfinite(matrices).all():
            raise ValueError(
                f"The gradient or momentum {leaf_name(path)} is not finite. Take it from another "
                "step."
            )
        spectra[plan.path] = _squared_singular_values(matrices)
    return spectra


def _squared_singular_values(matrices: np.ndarray) -> np.ndarray:
    """Returns the squared singular values of ``(..., rows, cols)``, summed over the batch."""
    if matrices.shape[-2] < matrices.shape[-1]:
        matrices = matrices.mT
    # Use the smaller Gram matrix: the cost depends on the features, not on 50 000 rows of a
    # vocabulary.
    values = np.linalg.eigvalsh(matrices.mT @ matrices)
    # Rounding can make the smallest values negative.
    values = np.maximum(values, 0).reshape(-1, matrices.shape[-1])
    return values.sum(axis=0)[::-1]  # the largest first


def _moments(node: Any) -> Mapping[str, Any]:
    """Returns the fields of a state that holds a momentum, or an empty mapping for any other node.

    Adam's and Muon's state may also be a dictionary, as a checkpoint restores it. A dictionary with
    only one of the names could as well be a model's.
    """
    if hasattr(node, "_asdict"):
        fields = node._asdict()
    elif isinstance(node, Mapping) and "mu" in node and node.keys() & _BESIDE_MU:
        fields = node
    else:
        return {}
    if not fields.keys() & _MOMENTA:
        return {}
    is_state = True
    if "nu" in fields:
        # SM3 has lists for each parameter in the place of second moments.
        is_state = jax.tree.structure(fields.get("mu")) == jax.tree.structure(fields["nu"])
    elif _MUON not in fields:
        # A lone momentum has at most a counter beside it. What has more is a training state, in
        # which `ema` may be averaged parameters.
        others = [field for name, field in fields.items() if name not in _MOMENTA]
        is_state = not any(map(np.ndim, jax.tree.leaves(others)))
    return fields if is_state else {}


def _has_leading_axis(fields: Mapping[str, Any]) -> bool:
    """Returns whether the counter and all moments of a state begin with the same axis."""
    counts = jax.tree.leaves(fields.get("count"))
    if len(counts) != 1 or not np.ndim(counts[0]):
        return False
    axes = np.shape(counts[0])
    moments = [fields[name] for name in _MOMENTA & fields.keys()]
    shapes = map(np.shape, jax.tree.leaves(moments))
    return all(shape[: len(axes)] == axes for shape in shapes)


def _merged(parts: Sequence[PyTree]) -> PyTree:
    """Merges trees in which each leaf, or whole branch, is masked in all but one.

    Raises:
      ValueError: If several trees have the same leaf, or they are of different parameters.
    """
    present = [part for part in parts if not is_masked(part)]
    if not present:
        return parts[0]
    if len(present) == 1:
        return present[0]
    branches = []
    structures = []
    for part in present:
        # One level only, because a tree may be masked further up than another.
        children, structure = jax.tree.flatten(part, functools.partial(operator.is_not, part))
        branches.append(children)
        structures.append(structure)
    (structure, *others) = structures
    if any(other != structure for other in others) or jax.tree_util.treedef_is_leaf(structure):
        raise ValueError(
            "`opt_state` holds the momenta of several models, as of a generator and a "
            "discriminator, or several momenta of one. Pass the state of one optimizer."
        )
    return structure.unflatten(map(_merged, zip(*branches, strict=True)))


def _steps(fields: Mapping[str, Any]) -> PyTree:
    """Returns the direction in which an optimizer steps, by the fields of its state.

    SGD and Adafactor step along their momentum as it is. Muon makes its matrices orthogonal and
    Lion takes the sign, so that each of their leaves counts by its size.
    """
    if "nu" in fields:
        return jax.tree.map(_adam_step, fields["mu"], fields["nu"])
    if "mu" in fields:
        return jax.tree.map(_direction, fields["mu"])
    (momentum,) = (fields[name] for name in _MOMENTA if name in fields)
    return momentum


def _wide(moment: Any) -> np.ndarray:
    """Returns a moment in double precision."""
    moment = np.asarray(moment)
    if np.iscomplexobj(moment):  # not compressed, and so not read
        return moment
    return moment.astype(np.float64)


def _adam_step(mu: Any, nu: Any) -> np.ndarray:
    nu = _wide(nu)
    # Divided by an infinite moment a step would be zero, as if the leaf were not trained.
    nu = np.where(np.isfinite(nu), nu, np.nan)
    return _wide(mu) / (np.sqrt(nu) + _EPS)


def _direction(mu: Any) -> np.ndarray:
    """Divides a momentum by its root mean square, so that leaves can be compared."""
    mu = _wide(mu)
    size = np.sqrt(np.mean(np.abs(mu) ** 2))
    return mu / (size + np.finfo(np.float64).tiny)  # zeros stay zeros


USUAL_TOKENS = 1024  # tokens in a step of all replicas together, in most runs


@dataclasses.dataclass(frozen=True)
class Law:
    r"""Predicts the gap before a run, from the model's width and the batch.

    For PowerSGD from the first step on, with factors in six or eight bits,

    .. math::
        \mathrm{gap} = a\, \sqrt{t / 1024}\; \max(0,\; 1 / r - k / w)

    in per cent of the held-out loss, with the rank :math:`r`, the model's width :math:`w` and the
    tokens :math:`t` in a step of all replicas together. From rank :math:`w / k` on the gap is zero.
    The runs trained small language models; for other widths and batches nothing is known.
    ``python -m benchmarks.optimizers --law`` fits the coefficients again and compares the law with
    runs that were not fitted.
    """

    runs: int  # number of fitted runs
    widths: tuple[int, int]  # smallest and largest width of the runs
    tokens: tuple[int, int]
    a: float  # per cent
    k: float
    error: float  # root mean square error of log(gap), in settings of other depths and contexts

    def gap(self, rank: int, width: float, tokens: float) -> float:
        """Returns the expected gap as a fraction: 0.01 is 1% above the exact run."""
        return self._slope(tokens) * max(0.0, 1 / rank - self.k / width)

    def half_width(self, rank: int, width: float, tokens: float) -> float:
        """Returns how far above the expected gap 95% of the settings lie at most, as a fraction.

        A setting's gap is the mean over seeds. The law uses neither depth nor context, and these
        change the gap by more than a seed does.
        """
        return _half_width(self.gap(rank, width, tokens), self.error)

    def rank(self, budget: float, width: float, tokens: float) -> int:
        """Returns the smallest rank, a multiple of 8, with an expected gap within `budget`."""
        least = 1 / (budget / self._slope(tokens) + self.k / width)
        return 8 * math.ceil(least / 8)

    def covers(self, width: float, tokens: float) -> bool:
        """Returns whether the width and the tokens lie within the range of the fitted runs."""
        least, most = self.widths
        few, many = self.tokens
        return least <= width <= most and few <= tokens <= many

    def _slope(self, tokens: float) -> float:
        return self.a * math.sqrt(tokens / USUAL_TOKENS) / 100


# python -m benchmarks.optimizers --law
LAWS = {
    "adamw": Law(118, (64, 512), (512, 4096), a=39.5, k=2.63, error=0.41),
    "muon": Law(46, (128, 512), (512, 1024), a=103.1, k=0.87, error=0.41),
}
