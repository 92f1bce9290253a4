"""Pairs torch layers with Flax layers: by a rule, by name, or by shape.

The user's rules come first. Then layers of equal names are paired (``layers.0.conv1`` and
``layers_0/conv1``). If two modules have equal names, the layers in one can then be paired only with
layers in the other. Then a layer is paired if its shapes leave only one choice with which all
layers have a partner. The other layers stay open, in groups of layers that fit each other.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from torch_bridge._pairing.kinds import CONV1D, join
from torch_bridge._pairing.layers import Layer, replace_layers
from torch_bridge._pairing.leaves import words_of
from torch_bridge._pairing.options import Options
from torch_bridge._pairing.pairs import Path, Shape
from torch_bridge._pairing.rules import Ruled, width_of

Partners: TypeAlias = dict[Layer, Layer]
_T = TypeVar("_T")
# Numbers of parts of a packed Linear: (query, key, value), (key, value), the gates of a cell.
PACKED = (3, 2, 4)
UNUSUAL = 1
FITS = 2


class Group(NamedTuple):
    """Some torch layers and some Flax layers, in the order of the models."""

    torch: list[Layer]
    flax: list[Layer]

    def without(self, partners: Mapping[Layer, Layer]) -> Group:
        """Returns the layers that `partners` does not pair."""
        taken = set(partners.values())
        torch = itertools.filterfalse(partners.__contains__, self.torch)
        flax = itertools.filterfalse(taken.__contains__, self.flax)
        return Group(list(torch), list(flax))


class Table(NamedTuple):
    """Tells which layers fit each other.

    Attributes:
      layers: The layers.
      strengths: Shape (torch layers, Flax layers): `FITS`, `UNUSUAL`, or 0 if they do not fit.
    """

    layers: Group
    strengths: np.ndarray

    def groups(self) -> Iterator[Table]:
        """Divides the layers into groups that fit each other.

        A layer that fits no other is in a group with one empty side.
        """
        torch, flax = self.layers
        nodes = len(torch) + len(flax)
        rows, columns = np.nonzero(self.strengths)
        ends = (rows, columns + len(torch))
        graph = coo_array((np.ones(len(rows)), ends), shape=(nodes, nodes))
        count, labels = connected_components(graph, directed=False)
        for label in range(count):
            rows = np.flatnonzero(labels[: len(torch)] == label)
            columns = np.flatnonzero(labels[len(torch) :] == label)
            members = Group([torch[row] for row in rows], [flax[column] for column in columns])
            yield Table(members, self.strengths[np.ix_(rows, columns)])


class Match:
    """The layers of two models and the pairs of layers that are decided.

    Attributes:
      layers: The layers of both models; rules may have divided some into parts.
      tensors: The names of all torch tensors.
      ruled: What the user's rules decide.
      partners: Torch layer -> Flax layer, for the decided pairs.
      by_name: The torch layers whose partner has an equal name.
      options: The user's options. With `plain` a layer that fits somewhere in its usual form is not
        paired in another form.
      known: Tensor name -> the form of its module's weight, for torch's own classes.
    """

    def __init__(
        self,
        torch: Iterable[Layer],
        flax: Iterable[Layer],
        options: Options,
        known: Mapping[str, str],
    ) -> None:
        self.layers = Group(list(torch), list(flax))
        self.tensors = set(itertools.chain.from_iterable(map(Layer.tensors, self.layers.torch)))
        self.ruled = Ruled(*self.layers, options.rules)
        self.partners: Partners = dict(self.ruled.partners)
        self.by_name = set()
        self.options = options
        self.known = known
        self._fits = {}

    def fits(self, layer: Layer, target: Layer) -> int:
        """Returns `FITS`, `UNUSUAL` (the layers fit only as a matrix stored (in, out)), or 0.

        The results are cached by shapes, because a large model has few different shapes.
        """
        key = (layer.signature, target.signature)
        if key not in self._fits:
            joined = join(layer, target)
            self._fits[key] = FITS if joined.fits else 0
            if joined.fits and joined.forms[0] == CONV1D:
                self._fits[key] = UNUSUAL
        return self._fits[key]

    def open(self) -> Group:
        """Returns the layers without a partner."""
        return self.layers.without(self.partners)

    def take_apart(self, layers: Group) -> None:
        """Divides layers into one layer for each of their parts, if parts of two sides fit.

        All other open layers that fit these are divided, too: which of them are the parts of the
        other side is not known.
        """
        apart = set()  # signatures
        for layer, target in _of_each_signature(layers):
            if any(itertools.starmap(self.fits, itertools.product(_parts(layer), _parts(target)))):
                apart.update((layer.signature, target.signature))
        opened = self.open()
        for layer, target in 2 * _of_each_signature(opened):
            both = (layer.signature, target.signature)
            if not apart.isdisjoint(both) and self.fits(layer, target):
                apart.update(both)
        for members, side in zip(opened, self.layers, strict=True):
            divided = filter(lambda layer: layer.signature in apart, members)
            replace_layers(side, {layer: _parts(layer) for layer in divided})

    def take_shares(self, layers: Group) -> None:
        """Divides packed Linears into shares, if more layers have a partner then.

        Layers of one shape are divided alike. A convolution over single places counts as a Linear.
        """
        targets = list(grouped(layers.flax, lambda target: target.signature).values())
        packed = {}
        fewest = len(layers.torch) + len(layers.flax) - 2 * len(self.assign({}, layers))
        for alike in grouped(layers.torch, lambda layer: layer.signature).values():
            weight = alike[0].shape("weight")
            if len(weight) < 2 or math.prod(weight[2:]) > 1:
                continue
            for sizes in _divisions(alike[0], targets):
                divided = dict(packed)
                for layer in alike:
                    divided[layer] = layer.shares(sizes)
                torch = layers.torch.copy()
                replace_layers(torch, divided)
                paired = self.assign({}, Group(torch, layers.flax))
                shares = set(itertools.chain.from_iterable(divided.values()))
                alone = len(torch) + len(layers.flax) - 2 * len(paired)
                if alone < fewest and shares <= paired.keys():
                    fewest = alone
                    packed = divided
        replace_layers(self.layers.torch, packed)

    def match_names(self, *, misfits: bool = True) -> None:
        """Pairs layers of equal names, if both sides count all modules around them alike.

        Args:
          misfits: Whether to pair layers whose shapes differ, too, so that the error lists them.
        """
        unlike = _unlike(*(_beginnings(side, whole=True) for side in self.layers))
        torch, flax = self.open()
        theirs = {}
        for target in flax:
            theirs[target.words, target.numbers] = target
        for layer in torch:
            target = theirs.get((layer.words, layer.numbers))
            words = dict(_beginnings([layer], whole=True))
            if target is None or layer.share or not unlike.isdisjoint(words):
                continue
            joined = join(layer, target)
            if joined.fits or (misfits and (joined.links or joined.problems["mis_shaped"])):
                self.partners[layer] = target
                self.by_name.add(layer)

    def match_shapes(self) -> None:
        """Pairs a torch and a Flax layer if one of them fits only the other."""
        (torch, flax), strengths = self._candidates()
        could_be = strengths > 0
        forced = could_be
        while forced.any():
            # Two layers that fit only the same layer stay open.
            alone = could_be & (could_be.sum(1, keepdims=True) == 1)
            only = could_be & (could_be.sum(0) == 1)
            forced = alone & (alone.sum(0) == 1) | only & (only.sum(1, keepdims=True) == 1)
            for row, column in np.argwhere(forced):
                self.partners[torch[row]] = flax[column]
            could_be &= ~forced.any(0) & ~forced.any(1, keepdims=True)

    def groups(self) -> tuple[list[Group], Group]:
        """Returns the open layers: groups that fit each other, and layers that fit no other."""
        groups = []
        unmatched = Group([], [])
        for layers, _ in self._candidates().groups():
            if all(layers):
                groups.append(layers)
            else:
                unmatched.torch.extend(layers.torch)
                unmatched.flax.extend(layers.flax)
        return groups, unmatched

    def assign(self, decided: Mapping[Layer, Layer], layers: Group) -> Partners:
        """Pairs as many fitting layers as possible.

        Among the ways to do so it takes the one that pairs layers at similar positions. A position
        is counted among the layers that fit each other.

        Args:
          decided: The pairs that are decided already.
          layers: The layers, in the orders whose positions count.
        """
        partners = dict(decided)
        # Any two layers may be in one module.
        table = self._table(layers.without(decided), lambda _: None)
        for (torch, flax), strengths in table.groups():
            # One more layer in its usual form outweighs all places; one more pair outweighs both.
            count = 1.0 + len(torch)
            penalties = np.array([count**2 + 2 * count, count, 0.0])  # for 0, UNUSUAL and FITS
            places = np.arange(len(torch)) / max(len(torch), 1)
            targets = np.arange(len(flax)) / max(len(flax), 1)
            costs = np.subtract.outer(places, targets) ** 2 + penalties[strengths]
            for row, column in zip(*linear_sum_assignment(costs), strict=True):
                if strengths[row, column]:
                    partners[torch[row]] = flax[column]
        return partners

    def in_order(self, partners: Partners) -> Partners:
        """Returns the partners in the order of torch's layers."""
        ordered = {}
        for layer in self.layers.torch:
            if layer in partners:
                ordered[layer] = partners[layer]
        return ordered

    def _candidates(self) -> Table:
        """Tells which open layers fit.

        Two layers can fit only if the innermost module that both sides have is the same for both.
        Blocks may be numbered in opposite orders. So a number in a module's name counts only if
        layers in the module have equal names.
        """
        ours, theirs = (_beginnings(side, whole=False) for side in self.layers)
        unlike = _unlike(ours, theirs)
        counts = collections.Counter(words for words, _ in ours | theirs)
        named = _beginnings(self.by_name, whole=False)
        shared = set()
        for name in ours & theirs:
            if name in named or counts[name[0]] == 1:
                shared.add(name)

        def innermost(layer: Layer) -> Any:
            module = layer.segments[:-1]
            longest: Any = ()
            for length in range(len(module) + 1):
                name = words_of(module[:length])
                if name[0] in unlike:
                    break
                if name in shared:
                    longest = name
            return longest

        table = self._table(self.open(), innermost)
        if self.options.plain:
            usual = table.strengths == FITS
            table.strengths[usual.any(1)] *= usual[usual.any(1)]
        return table

    def _table(self, layers: Group, module: Callable[[Layer], Any]) -> Table:
        """Tells which layers fit, among those for which `module` returns the same."""
        places = []  # for both sides: module and signature -> positions of equal layers
        for side in layers:
            keys = [(module(layer), layer.signature) for layer in side]
            places.append(grouped(range(len(side)), keys.__getitem__))
        strengths = np.zeros(tuple(map(len, layers)), int)
        for (ours, rows), (theirs, columns) in itertools.product(*map(dict.items, places)):
            if ours[0] == theirs[0]:
                fits = self.fits(layers.torch[rows[0]], layers.flax[columns[0]])
                strengths[np.ix_(rows, columns)] = fits
        return Table(layers, strengths)


def grouped(members: Iterable[_T], key: Callable[[_T], Any]) -> dict[Any, list[_T]]:
    """Groups members by the value of `key`, in their order."""
    groups = {}
    for member in members:
        groups.setdefault(key(member), []).append(member)
    return groups


def _of_each_signature(layers: Group) -> list[tuple[Layer, Layer]]:
    """Lists a torch layer and a Flax layer for every two signatures."""
    sides = []
    for side in layers:
        sides.append({layer.signature: layer for layer in side}.values())
    return list(itertools.product(*sides))


def _parts(layer: Layer) -> list[Layer]:
    """Returns a layer for each part of a layer that can be divided."""
    if len(layer.parts) == 1 or layer.kind in ("attention", "recurrent"):
        return [layer]
    return list(map(layer.single, layer.parts))


def _unlike(ours: set[tuple[Path, Shape]], theirs: set[tuple[Path, Shape]]) -> AbstractSet[Path]:
    """Returns the words of the names that both sides number otherwise.

    Names with numbers form a series. A series counts only if one side has all numbers of the other.
    So ``fc1``, ``fc2`` on one side and ``fc0``, ``fc1`` on the other share no name.
    """
    return dict(ours - theirs).keys() & dict(theirs - ours).keys()


def _beginnings(layers: Iterable[Layer], *, whole: bool) -> set[tuple[Path, Shape]]:
    """Returns the words and numbers of all modules around some layers, or of the layers, too."""
    names = set()
    for layer in layers:
        for length in range(len(layer.segments) + whole):
            names.add(words_of(layer.segments[:length]))
    return names


def _divisions(layer: Layer, targets: Iterable[Sequence[Layer]]) -> Iterator[Shape]:
    """Yields the ratios in which a packed layer may be divided, the likeliest first.

    The parts are equal, or the queries of several heads share a key and a value.

    Args:
      layer: The torch layer.
      targets: The Flax layers, in lists of equal layers.
    """
    rows, *inputs = layer.shape("weight")
    for count in PACKED:
        if rows % count == 0:
            yield (1,) * count
    for alike in targets:
        width = width_of(alike[0], math.prod(inputs))
        if width and rows % width == 0 and rows // width > 3:
            yield (rows // width - 2, 1, 1)
