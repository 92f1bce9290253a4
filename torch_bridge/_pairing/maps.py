"""Where a map (C, H, W) is flattened or becomes one, which no shape shows."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from torch_bridge._pairing.doubts import Couples, form_of, shapes, storage
from torch_bridge._pairing.units import FlaxUnit, TorchUnit

_IMAGE = 4  # channels, at most
_Facts = tuple[str, int, int, int]  # convolution, its channels and spatial axes, inputs behind it


@dataclasses.dataclass(frozen=True)
class Map:
    """What the inputs of a layer may have been flattened from, or its outputs may become.

    Attributes:
      shape: Channels first.
      question: What to ask before it is taken for that; empty if it can be nothing else.
    """

    shape: tuple[int, ...]
    question: str = ""


@dataclasses.dataclass(frozen=True)
class Maps:
    """Where torch's (C, H, W) and Flax's (H, W, C) may put values in another order.

    Attributes:
      flatten: Layers that may read a map; likewise `unflatten` for those whose outputs become one.
      follows: Norm -> the option and the layer whose map is its own, too.
    """

    flatten: Mapping[TorchUnit, Map]
    unflatten: Mapping[TorchUnit, Map]
    follows: Mapping[TorchUnit, tuple[str, TorchUnit]]

    @classmethod
    def of(cls, units: Sequence[TorchUnit], couples: Couples) -> Maps:
        """Of a model whose layers are coupled."""
        follows = _norms_beside(units, couples)
        flatten = _maybe_flattened(units, couples, follows)
        return cls(flatten, _maybe_unflattened(units, couples, flatten), follows)


def _norms_beside(
    units: Sequence[TorchUnit], couples: Couples
) -> dict[TorchUnit, tuple[str, TorchUnit]]:
    """Norms of as many values as the layer behind them reads, or the matrix before them gives."""
    follows: dict[TorchUnit, tuple[str, TorchUnit]] = {}
    behind: list[TorchUnit] = []  # norms since `before`
    before: TorchUnit | None = None
    for unit in units:
        if unit.family == "norm":
            behind.append(unit)
            continue
        given = _outputs(before, couples)
        for norm in behind:
            if before is not None and _values(norm) == given:
                if _is_matrix(before, couples):
                    follows[norm] = ("unflatten", before)
            elif _reads(unit, couples) and _values(norm) == _inputs(unit, couples.get(unit)):
                follows[norm] = ("flatten", unit)
        before, behind = unit, []
    return follows


def _values(norm: TorchUnit) -> int:
    return max(shape[0] for _, shape in norm.entries.values())


def _is_matrix(unit: TorchUnit, couples: Couples) -> bool:
    shape, kernel = shapes(unit, couples.get(unit))
    return unit.family == "weight" and len(shape) == 2 and bool(kernel)


def _reads(unit: TorchUnit, couples: Couples) -> bool:
    return unit in couples and ("weight_ih" in unit.entries or _is_matrix(unit, couples))


def _outputs(unit: TorchUnit | None, couples: Couples) -> int:
    """How many values (or channels) a layer gives; 0 if that is not known."""
    target = couples.get(unit) if unit is not None else None
    if unit is None or target is None:
        return 0
    if unit.family == "recurrent":
        return unit.entries["weight_hh"][1][-1] if "weight_hh" in unit.entries else 0
    shape, kernel = shapes(unit, target)
    if not kernel:
        return shape[-1] if unit.family == "weight" and shape else 0
    if len(shape) > 2:
        return _channels(unit, target)[1]
    n_in = _inputs(unit, target)
    return math.prod(shape) // n_in if n_in else 0


def _maybe_flattened(
    units: Sequence[TorchUnit],
    couples: Couples,
    follows: Mapping[TorchUnit, tuple[str, TorchUnit]],
) -> dict[TorchUnit, Map]:
    """Matrices and recurrent layers behind a convolution that have several inputs per channel.

    Torch flattens (C, H, W) and Flax (H, W, C), so that the columns of such a matrix have to move,
    and no shape shows it. Nothing but normalisation stands between the two in the state dict; every
    later matrix with as many inputs (the log-variance beside the mean, a second head) counts, too.
    It is sure where the map is square, no further convolution follows, as at the end of a
    classifier, no other matrix has as many outputs, and none was declared before a convolution that
    it may stand behind. A recurrent layer may read the map in many ways, row by row for example.
    """
    found: dict[TorchUnit, _Facts] = {}
    kernels = [u for u in units if u.family == "weight" and len(shapes(u, couples.get(u))[0]) > 2]
    before: tuple[str, int, int] | None = None  # name, channels and spatial axes of a convolution
    width = 0
    for unit in units:
        target = couples.get(unit)
        shape = shapes(unit, target)[0]
        if target is not None and unit in kernels:
            before, width = (unit.name, _channels(unit, target)[1], len(shape) - 2), 0
        elif target is not None and before is not None and _may_read(unit, shape):
            n_in = _inputs(unit, target)
            if width in (0, n_in) and _is_map(n_in, before[1]):
                width, found[unit] = n_in, (*before, n_in)
            else:
                before = None
        elif unit.family != "norm":
            before = None
    # In every one of many blocks it is something else, an embedding of the time for example.
    behind = {(unit.stem.words, facts[0]) for unit, facts in found.items()}
    blocks = collections.Counter(words for words, _ in behind)
    found = {unit: facts for unit, facts in found.items() if blocks[unit.stem.words] == 1}
    found, doubtful = _with_further_heads(units, couples, found)
    early = _declared_before(units, couples, found)
    last = units.index(kernels[-1]) if kernels else 0
    alike = collections.Counter(unit.stem.words for unit in kernels)
    branches = alike[kernels[-1].stem.words] if kernels else 0
    return {
        unit: _map(
            unit.name,
            *facts,
            sure=units.index(unit) > last
            and unit not in doubtful
            and not early
            and unit.family != "norm",
            branches=branches,
            what="values" if unit.family == "norm" else "inputs",
        )
        for unit, facts in {**found, **early, **_norms_of(units, couples, found, follows)}.items()
    }


def _may_read(unit: TorchUnit, shape: tuple[int, ...]) -> bool:
    return "weight_ih" in unit.entries or (unit.family == "weight" and bool(shape))


def _norms_of(
    units: Sequence[TorchUnit],
    couples: Couples,
    found: Mapping[TorchUnit, _Facts],
    follows: Mapping[TorchUnit, tuple[str, TorchUnit]],
) -> dict[TorchUnit, _Facts]:
    """Norms of the size of a map that no layer beside them explains, and no layer's outputs."""
    outputs = {_outputs(unit, couples) for unit in units}
    known = {facts[3]: facts for facts in found.values() if facts[3] not in outputs}
    norms = [unit for unit in units if unit.family == "norm" and unit not in follows]
    return {norm: known[_values(norm)] for norm in norms if _values(norm) in known}


def _maybe_unflattened(
    units: Sequence[TorchUnit], couples: Couples, flattened: Collection[TorchUnit]
) -> dict[TorchUnit, Map]:
    """Matrices before a convolution that have several outputs for each channel it reads.

    Not those that have as many outputs as a later layer has inputs, unless it may read a map
    itself, and not those of many blocks. None is ever sure: the two need not belong together.
    """
    found: dict[TorchUnit, _Facts] = {}
    later: set[int] = set()
    after: TorchUnit | None = None
    for unit in reversed(units):
        shape = shapes(after, couples.get(after))[0] if after is not None else ()
        if _is_matrix(unit, couples) and after in couples and len(shape) > 2:
            assert after is not None
            n_out, channels = _outputs(unit, couples), _channels(after, couples[after])[0]
            if n_out not in later and channels > _IMAGE and _is_map(n_out, channels):
                found[unit] = (after.name, channels, len(shape) - 2, n_out)
        if _reads(unit, couples) and unit not in flattened:
            later.add(_inputs(unit, couples[unit]))
        after = after if unit.family == "norm" else unit
    blocks = collections.Counter(unit.stem.words for unit in found)
    maps = {}
    for unit, (name, channels, axes, n_out) in found.items():
        if blocks[unit.stem.words] == 1:
            shape = _shape_of(channels, axes, n_out)
            maps[unit] = Map(
                shape,
                f"{unit.name} has {n_out} outputs and may feed {name}, which reads {channels} "
                f"channels: say which shape they become with unflatten={{{unit.name!r}: {shape}}}, "
                f"or that they become none with unflatten={{{unit.name!r}: None}}",
            )
    return maps


def _channels(unit: TorchUnit, target: FlaxUnit) -> tuple[int, int]:
    """Of the input, in a group, and of the output of a convolution."""
    a, b = shapes(unit, target)[0][:2]
    return (a, b) if form_of(unit, target) == "transposed" else (b, a)


def _inputs(unit: TorchUnit, target: FlaxUnit | None) -> int:
    if unit.family == "recurrent":
        return unit.entries["weight_ih"][1][-1]
    if target is None:
        return 0
    shape = shapes(unit, target)[0]
    return shape[0] if storage(unit, target) == "straight" else shape[-1]


def _with_further_heads(
    units: Sequence[TorchUnit], couples: Couples, found: Mapping[TorchUnit, _Facts]
) -> tuple[dict[TorchUnit, _Facts], set[TorchUnit]]:
    """Adds later matrices that may read a map, too, and says which may read a layer instead."""
    known: dict[int, _Facts] = {}  # inputs -> the map
    heads: dict[TorchUnit, _Facts] = {}
    doubtful: set[TorchUnit] = set()
    outputs: set[int] = set()
    for unit in units:
        if not _reads(unit, couples):
            continue
        n_in, n_out = _inputs(unit, couples[unit]), _outputs(unit, couples)
        recurrent = unit.family == "recurrent"
        facts = found.get(unit)
        if facts is not None and facts not in known.values():
            known[n_in] = heads[unit] = facts  # the first behind its convolution
        elif n_in in known and not (recurrent and n_in in outputs):
            heads[unit] = facts or known[n_in]
            doubtful |= {unit} if n_in in outputs else set()
        doubtful |= {unit} if recurrent else set()
        outputs |= {n_out, 2 * n_out} if recurrent else {n_out}  # of both directions
    return heads, doubtful


def _declared_before(
    units: Sequence[TorchUnit], couples: Couples, found: Collection[TorchUnit]
) -> dict[TorchUnit, _Facts]:
    """Matrices that may read a convolution which their own module, or one in it, declares later.

    Not those that have as many inputs as another layer has outputs, whose inputs they rather are,
    and not those that feed the next convolution.
    """
    outputs: dict[TorchUnit, int] = {}
    convolutions: list[tuple[int, TorchUnit]] = []
    for position, unit in enumerate(units):
        shape, kernel = shapes(unit, couples.get(unit))
        if unit.family == "weight" and len(shape) == 2:
            n_in = _inputs(unit, couples[unit]) if kernel else shape[0]
            outputs[unit] = shape[0] * shape[1] // max(n_in, 1)
        elif unit.family == "weight" and len(shape) > 2:
            convolutions.append((position, unit))
    early: dict[TorchUnit, _Facts] = {}
    for unit, n_out in outputs.items():
        n_in, module = _inputs(unit, couples[unit]), unit.name.rpartition(".")[0]
        later = [u for p, u in convolutions if p > units.index(unit) and _is_in(u.name, module)]
        if unit in found or not later or not shapes(unit, couples[unit])[1]:
            continue
        fed = _channels(later[0], couples[later[0]])[0]
        feeds = fed > _IMAGE and n_out % fed == 0
        if feeds or any(n == n_in for u, n in outputs.items() if u is not unit):
            continue
        # The last one that it can read decides: all its channels, averaged, or a map of them.
        for conv in reversed(later):
            channels = _channels(conv, couples[conv])[1]
            if _is_map(n_in, channels):
                axes = len(shapes(conv, couples[conv])[0]) - 2
                early[unit] = (conv.name, channels, axes, n_in)
            if n_in == channels or unit in early:
                break
    return early


def _is_in(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def _is_map(n_in: int, channels: int) -> bool:
    """Whether so many inputs can be a map of several places; one of one channel has one order."""
    return channels > 1 and n_in % channels == 0 and n_in > channels


def _shape_of(channels: int, axes: int, values: int) -> tuple[int, ...]:
    """Channels and places, as a square if it can be one."""
    places = values // channels
    side = round(places ** (1 / axes))
    return (channels, *[side] * axes) if side**axes == places else (channels, places)


def _map(
    name: str,
    after: str,
    channels: int,
    axes: int,
    n_in: int,
    *,
    sure: bool,
    branches: int,
    what: str,
) -> Map:
    places = n_in // channels
    shape = _shape_of(channels, axes, n_in)
    sure &= len(shape) == axes + 1
    # As many convolutions as places may stand side by side, their outputs one after the other.
    if sure and axes > 1 and branches != places:
        return Map(shape)
    return Map(
        shape,
        f"{name} has {n_in} {what} and may read {after} with {channels} channels: say from which "
        f"shape they were flattened with flatten={{{name!r}: {shape}}}, or that they were not with "
        f"flatten={{{name!r}: None}}",
    )
