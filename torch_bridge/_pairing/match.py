"""Pairs torch layers with Flax layers: by a rule, by name, or by shape.

The user's rules come first. Then layers of equal names are paired (``layers.0.conv1`` and
``layers_0/conv1``). If two modules have equal names, the layers in one can then be paired only with
layers in the other. Then a layer is paired if its shapes leave only one choice with which all
layers have a partner. The other layers stay open, in groups of layers that fit each other.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from torch_bridge._base.tensors import clean_names
from torch_bridge._pairing.kinds import CONV1D, join
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.leaves import without_collection, words_of
from torch_bridge._pairing.options import Options
from torch_bridge._pairing.pairs import Path

Partners: TypeAlias = dict[Layer, Layer]
_T = TypeVar("_T")
_PACKED = (3, 2, 4)  # numbers of parts of a packed Linear: (query, key, value), (key, value), gates
UNUSUAL = 1
FITS = 2


class Group(NamedTuple):
    """Torch layers and Flax layers that fit each other and are not paired yet."""

    torch: list[Layer]
    flax: list[Layer]

    def without(self, partners: Mapping[Layer, Layer]) -> Group:
        """Returns the layers that `partners` does not pair."""
        taken = set(partners.values())
        torch = [layer for layer in self.torch if layer not in partners]
        flax = [target for target in self.flax if target not in taken]
        return Group(torch, flax)


class Match:
    """The layers of two models and the pairs of layers that are decided.

    Attributes:
      torch: The torch layers; rules may have divided some into parts.
      flax: The Flax layers.
      partners: Torch layer -> Flax layer, for the decided pairs.
      by_rule: The torch layers whose partner a rule names.
      by_name: The torch layers whose partner has an equal name.
      problems: A line of text for each rule that cannot be followed.
      options: The user's options. With `plain` a layer that fits somewhere in its usual form is not
        paired in another form.
      known: Module name -> the form of its weight, for torch's own classes.
    """

    def __init__(
        self,
        torch: Iterable[Layer],
        flax: Iterable[Layer],
        options: Options,
        known: Mapping[str, str],
    ) -> None:
        self.torch = list(torch)
        self.flax = list(flax)
        self.partners: Partners = {}
        self.by_name = set()
        self.problems = []
        self.options = options
        self.known = known
        self._fits = {}
        if options.rules:
            self._follow(options.rules)
        self.by_rule = set(self.partners)

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

    # --- by a rule ------------------------------------------------------------------------------

    def _follow(self, rules: Sequence[tuple[str, str]]) -> None:
        """Pairs the layers that rules name, or single tensors and leaves of two other layers."""
        tensors = itertools.chain.from_iterable(map(Layer.tensors, self.torch))
        names = clean_names(list(tensors))
        owners = {}
        leaves = {}
        for target in self.flax:
            owners["/".join(target.segments)] = target
        for target in self.flax:
            for leaf, (path, _) in target.parts.items():
                owners["/".join(path)] = target
                leaves["/".join(path)] = leaf
        shares = {}
        for layer in self.torch.copy():
            sent = {}
            for part, (name, _) in list(layer.parts.items()):
                pattern, paths = _first_rule(rules, [names[name], layer.name])
                leaf = None
                if len(paths) == 1:
                    leaf = leaves.get(paths[0])
                if leaf is not None and not _meet(layer, part, owners[paths[0]], leaf, pattern):
                    owners[paths[0]] = self._alone(layer, part, owners[paths[0]], leaf)
                    del leaves[paths[0]]
                elif paths:
                    targets = tuple(map(owners.get, paths))
                    sent.setdefault(targets, (pattern, paths))
            if sent:
                shares[layer] = self._send(layer, sent)
        _exchange(self.torch, shares)

    def _alone(self, layer: Layer, part: str, target: Layer, leaf: str) -> Layer:
        """Pairs a tensor with a leaf, each as a layer by itself, and returns the Flax layer."""
        one = layer.single(part)
        other = target.single(leaf)
        del layer.parts[part]
        del target.parts[leaf]
        join.cache_clear()  # its entries for these two layers are out of date
        _exchange(self.torch, {layer: [one, layer]})
        _exchange(self.flax, {target: [other, target]})
        self.partners[one] = other
        return other

    def _send(self, layer: Layer, sent: Mapping[Any, tuple[str, list[str]]]) -> list[Layer]:
        """Follows the rule for one layer.

        If the rule names one Flax layer, pairs the two. If it names several, divides the torch
        layer into as many equal shares of its rows, and pairs each share.

        Returns:
          The shares, or the layer alone.
        """
        (targets, (pattern, paths)), *others = sent.items()
        text = f"the rule {pattern!r} sends {layer} to"
        shares = layer.shares(len(paths))
        for share, target, path in zip(shares, targets, paths, strict=True):
            if target is None:
                self.problems.append(
                    f"{text} {path}, which is neither a leaf nor a module of the Flax tree"
                )
            elif target in self.partners.values():
                self.problems.append(f"{text} {path}, where an earlier rule sends another layer")
            else:
                self.partners[share] = target
        for _, (other, elsewhere) in others:
            self.problems.append(
                f"{text} {'|'.join(paths)}, and {other!r} sends a part of it to "
                f"{'|'.join(elsewhere)}: let one rule name the whole layer"
            )
        return shares

    def take_apart(self, layers: Group) -> None:
        """Divides layers into one layer for each of their parts."""
        for parted, side in zip(layers, (self.torch, self.flax), strict=True):
            parts = {}
            for layer in parted:
                if len(layer.parts) > 1 and layer.sort not in ("attention", "recurrent"):
                    parts[layer] = [layer.single(part) for part in layer.parts]
            _exchange(side, parts)

    def take_shares(self, layers: Group) -> None:
        """Divides packed Linears into equal shares, if enough Flax layers fit the shares.

        A convolution over single places counts as a Linear.
        """
        packed = {}
        kinds = grouped(layers.flax, lambda target: target.signature).values()
        for layer in layers.torch:
            weight = layer.shape("weight")
            for count in _PACKED:
                if len(weight) < 2 or math.prod(weight[2:]) > 1 or weight[0] % count:
                    continue
                shares = layer.shares(count)
                places = 0
                for alike in kinds:
                    if self.fits(shares[0], alike[0]):
                        places += len(alike)
                if places >= count:
                    packed[layer] = shares
                    break
        _exchange(self.torch, packed)

    # --- by name, and by shape ------------------------------------------------------------------

    def match_names(self, *, misfits: bool = True) -> None:
        """Pairs layers of equal names.

        Args:
          misfits: Whether to pair layers whose shapes differ, too, so that the error lists them.
        """
        innermost = _shared(self.torch, self.flax)
        open_torch, open_flax = self.open()
        theirs = {(target.words, target.numbers): target for target in open_flax}
        for layer in open_torch:
            key = (layer.words, layer.numbers)
            target = theirs.get(key)
            if target is None or layer.share or innermost(layer.segments) != key:
                continue
            joined = join(layer, target)
            if joined.fits or (misfits and (joined.links or joined.problems["mis_shaped"])):
                self.partners[layer] = target
                self.by_name.add(layer)

    def match_shapes(self) -> None:
        """Pairs a torch and a Flax layer if one of them fits only the other."""
        ours, theirs, could_be = self._candidates()
        sizes = np.outer(list(map(len, ours)), list(map(len, theirs)))
        forced = could_be
        while forced.any():
            # Two layers that fit only the same layer stay open.
            alone = could_be & (could_be.sum(1, keepdims=True) == 1)
            only = could_be & (could_be.sum(0) == 1)
            forced = alone & (alone.sum(0) == 1) | only & (only.sum(1, keepdims=True) == 1)
            forced &= sizes == 1  # several alike layers cannot be told apart
            for row, column in np.argwhere(forced):
                self.partners[ours[row][0]] = theirs[column][0]
            could_be &= ~forced.any(0) & ~forced.any(1, keepdims=True)

    def groups(self) -> list[Group]:
        """Returns the open layers, in groups that fit each other.

        A layer that fits no other is in a group with one empty side.
        """
        ours, theirs, could_be = self._candidates()
        labels = _components(could_be)
        groups = [Group([], []) for _ in labels]
        group_of = {}
        for alike, label in zip(ours + theirs, labels, strict=True):
            group_of.update(dict.fromkeys(alike, groups[label]))
        torch, flax = self.open()
        for layer in torch:
            group_of[layer].torch.append(layer)
        for target in flax:
            group_of[target].flax.append(target)
        return list(filter(any, groups))

    def lonely(self) -> Group:
        """Returns the open layers that fit no layer of the other side."""
        fitting = set()
        for torch, flax in self.groups():
            if torch and flax:
                fitting.update(torch, flax)
        torch, flax = self.open()
        lonely = [layer for layer in torch if layer not in fitting]
        return Group(lonely, [target for target in flax if target not in fitting])

    def assign(
        self, decided: Mapping[Layer, Layer], torch: list[Layer], flax: list[Layer]
    ) -> Partners:
        """Pairs as many fitting layers as possible.

        Among the ways to do so it takes the one that pairs layers at similar positions. A position
        is counted among the layers that fit each other.

        Args:
          decided: The pairs that are decided already.
          torch: The torch layers, in the order whose positions count.
          flax: The Flax layers, in the order whose positions count.
        """
        ones, others = Group(torch, flax).without(decided)
        strengths = np.zeros((len(ones), len(others)), np.int8)
        rows = grouped(range(len(ones)), lambda place: ones[place].signature)
        columns = grouped(range(len(others)), lambda place: others[place].signature)
        for alike, fitting in itertools.product(rows.values(), columns.values()):
            strength = self.fits(ones[alike[0]], others[fitting[0]])
            strengths[np.ix_(alike, fitting)] = strength
        places, targets = _ranks(strengths)
        # One more layer in its usual form outweighs all places; one more pair outweighs both.
        count = 1.0 + len(ones)
        penalties = np.array([count**2 + 2 * count, count, 0.0])  # for 0, UNUSUAL and FITS
        costs = np.subtract.outer(places, targets) ** 2 + penalties[strengths]
        partners = dict(decided)
        for row, column in zip(*linear_sum_assignment(costs), strict=True):
            if strengths[row, column]:
                partners[ones[row]] = others[column]
        return self.in_order(partners)

    def in_order(self, partners: Partners) -> Partners:
        """Returns the partners in the order of torch's layers."""
        return {layer: partners[layer] for layer in self.torch if layer in partners}

    def open(self) -> Group:
        """Returns the layers without a partner."""
        return Group(self.torch, self.flax).without(self.partners)

    def _candidates(self) -> tuple[list[list[Layer]], list[list[Layer]], np.ndarray]:
        """Returns the open layers, in lists of equal layers, and a table of the lists that fit.

        Two layers can fit only if the innermost module that both sides have is the same for both.
        Blocks may be numbered in opposite orders. So a number in a module's name counts only if
        layers in the module have equal names.

        Returns:
          Lists of torch layers, lists of Flax layers, and a bool array of shape (torch lists, Flax
          lists).
        """
        named = set()
        for layer in self.by_name:
            for length in range(len(layer.segments)):
                named.add(words_of(layer.segments[:length]))
        innermost = _shared(self.torch, self.flax, named)

        def kind(layer: Layer) -> tuple[Any, Any]:
            return innermost(layer.segments[:-1]), layer.signature

        ours, theirs = (grouped(side, kind) for side in self.open())
        columns = {}  # module -> positions of its lists of Flax layers
        for column, (module, _) in enumerate(theirs):
            columns.setdefault(module, []).append(column)
        rows = list(ours.values())
        others = list(theirs.values())
        strengths = np.zeros((len(rows), len(others)), np.int8)
        for row, (module, _) in enumerate(ours):
            for column in columns.get(module, ()):
                strengths[row, column] = self.fits(rows[row][0], others[column][0])
        if self.options.plain:
            usual = strengths == FITS
            strengths[usual.any(1)] *= usual[usual.any(1)]
        return rows, others, strengths > 0


def grouped(members: Iterable[_T], key: Callable[[_T], Any]) -> dict[Any, list[_T]]:
    """Groups members by the value of `key`, in their order."""
    groups = {}
    for member in members:
        groups.setdefault(key(member), []).append(member)
    return groups


def _components(fits: np.ndarray) -> np.ndarray:
    """Returns a number for each row, then for each column: equal if they are connected by fits.

    Args:
      fits: Shape (rows, columns); not zero if the row fits the column.
    """
    size = len(fits)
    total = sum(fits.shape)
    if not total:
        return np.zeros(0, int)
    rows, columns = np.nonzero(fits)
    graph = coo_array((np.ones(len(rows)), (rows, columns + size)), shape=(total, total))
    return connected_components(graph, directed=False)[1]


def _ranks(strengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions of rows and columns among those that fit each other, from 0 to 1.

    Args:
      strengths: Shape (rows, columns); not zero if the row fits the column.
    """
    size = len(strengths)
    labels = _components(strengths)
    ranks = np.zeros(len(labels))
    for side in (slice(size), slice(size, None)):
        of_side = labels[side]
        for label in np.unique(of_side):
            alike = np.flatnonzero(of_side == label)
            ranks[side][alike] = np.arange(len(alike)) / len(alike)
    return ranks[:size], ranks[size:]


def _exchange(layers: list[Layer], parts: Mapping[Layer, Sequence[Layer]]) -> None:
    """Replaces layers by their parts, in place; drops layers without parts."""
    whole = layers.copy()
    layers.clear()
    for layer in whole:
        for part in parts.get(layer, [layer]):
            if part.parts:
                layers.append(part)


def _shared(
    torch: Iterable[Layer], flax: Iterable[Layer], named: set[Any] | None = None
) -> Callable[[Path], Any]:
    """Returns a function that finds the longest beginning of a name that both sides have.

    A series of names is equal only if one side has all numbers of the other side. ``fc1``, ``fc2``
    and ``fc0``, ``fc1`` are not equal, and neither are the layers in such modules.

    Args:
      torch: The torch layers.
      flax: The Flax layers.
      named: If it is a set, only names of modules are compared, and those with numbers count only
        if the set has them. If it is None, names of modules and layers are compared, and all count.
    """
    sides = []
    for members in (torch, flax):
        side = {}
        for layer in members:
            for length in range(len(layer.segments) + (named is None)):
                words, numbers = words_of(layer.segments[:length])
                side.setdefault(words, set()).add(numbers)
        sides.append(side)

    ours, theirs = sides
    both = set()
    other_series = set()
    for words in ours.keys() & theirs.keys():
        numbers = ours[words] & theirs[words]
        names = {(words, one) for one in numbers}
        if numbers not in (ours[words], theirs[words]):
            other_series.add(words)
        elif named is None or len(ours[words] | theirs[words]) == 1:
            both |= names
        else:
            both |= names & named

    def innermost(segments: Path) -> Any:
        longest: Any = ()
        for length in range(len(segments) + 1):
            name = words_of(segments[:length])
            if name[0] in other_series:
                break
            if name in both:
                longest = name
        return longest

    return innermost


def _meet(layer: Layer, part: str, target: Layer, leaf: str, pattern: str) -> bool:
    """Returns True if a rule for a tensor and a leaf should pair their whole layers.

    That is so if joining the layers links the tensor with the leaf. It is also so if the pattern
    matches the module's name, too, and joining the layers gives any link.
    """
    links = join(layer, target).links
    if any((link.tensor, link.leaf) == (part, leaf) for link in links):
        return True
    return bool(links) and re.fullmatch(pattern, layer.name) is not None


def _first_rule(rules: Sequence[tuple[str, str]], names: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the first rule's pattern that matches one of two names, with its expanded paths.

    Without such a rule the pattern is "" and the list of paths is empty.
    """
    for pattern, template in rules:
        match = re.fullmatch(pattern, names[0]) or re.fullmatch(pattern, names[1])
        if match is None:
            continue
        try:
            paths = match.expand(template).split("|")
        except (re.error, IndexError) as error:
            raise ValueError(
                f"`rules`: the path {template!r} of {pattern!r} cannot be used ({error})."
            ) from error
        targets = []
        for path in paths:
            words = tuple(path.strip("/").split("/"))
            targets.append("/".join(without_collection(words)))
        return pattern, targets
    return "", []
