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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from torch_bridge._pairing.pairs import Packing, Path, Shape

Partners: TypeAlias = dict[Layer, Layer]
_T = TypeVar("_T")
_QUERY_KEY_VALUE = 3
_PACKED = (
    _QUERY_KEY_VALUE,
    2,
    4,
)  # numbers of parts of a packed Linear: (query, key, value), (key, value), gates
UNUSUAL = 1
FITS = 2


class Group(NamedTuple):
    """Torch layers and Flax layers that fit each other and are not paired yet."""

    torch: list[Layer]
    flax: list[Layer]

    def without(self, partners: Mapping[Layer, Layer]) -> Group:
        """Returns the layers that `partners` does not pair."""
        taken = set(partners.values())
        torch = itertools.filterfalse(partners.__contains__, self.torch)
        flax = itertools.filterfalse(taken.__contains__, self.flax)
        return Group(list(torch), list(flax))


class Rule(NamedTuple):
    """A rule for a layer or tensor: one path, or the paths of the parts of a packed layer.

    Attributes:
      pattern: The regular expression.
      paths: The paths of Flax layers or leaves, in the order of torch's rows.
      groups: The number of groups of rows, each with rows of all parts; None if it is not said.
      sizes: The relative numbers of rows of the parts; () if the rule does not say them.
      places: The positions of torch's parts in a single packed Flax layer; () for several layers.
    """

    pattern: str
    paths: list[str]
    groups: int | None
    sizes: Shape
    places: Shape

    @classmethod
    def of(cls, pattern: str, text: str) -> Rule:
        """Reads ``query|key|value``, ``12*(query|key|value)`` or ``dense[0]|dense[2]|dense[1]``.

        A part that occurs several times in a row has as many blocks of rows in every group.

        Raises:
          ValueError: A part occurs at two places, or not all parts of a Flax layer are named.
        """
        in_groups = re.fullmatch(r"(\d+)\*\((.*)\)", text)
        groups = None
        if in_groups:
            groups = max(int(in_groups[1]), 1)
            text = in_groups[2]
        parts = []
        counts = []
        for part, run in itertools.groupby(text.split("|")):
            parts.append(part)
            counts.append(len(list(run)))
        paths = []
        places = []
        for part in parts:
            numbered = re.fullmatch(r"(.*)\[(\d+)\]", part)
            if numbered:
                part = numbered[1]
                places.append(int(numbered[2]))
            words = tuple(part.strip("/").split("/"))
            paths.append("/".join(without_collection(words)))
        if places:
            if len(set(paths)) > 1 or sorted(places) != list(range(len(paths))):
                raise ValueError(
                    f"`rules`: {text!r} of {pattern!r} must name every part of one Flax layer "
                    "once, as in 'dense[0]|dense[2]|dense[1]'."
                )
            paths = paths[:1]
        elif len(set(paths)) < len(paths):
            raise ValueError(
                f"`rules`: {text!r} of {pattern!r} names a Flax layer twice. Blocks of one part "
                "must follow each other, as in '8*(query|query|key|value)'."
            )
        sizes: Shape = ()
        if max(counts) > 1:
            sizes = tuple(counts)
        return cls(pattern, paths, groups, sizes, tuple(places))

    def packing(self, sizes: Shape) -> Packing | None:
        """Returns the order of the packed rows, for parts in the ratio of `sizes`.

        It is None if the parts follow each other in the same order in both frameworks.
        """
        order = self.places or tuple(range(len(sizes)))
        order = tuple(map(order.index, range(len(order))))
        packing = Packing(order, self.groups or 1, 1)
        if packing.torch_groups == 1 and packing.is_in_order:
            return None
        if len(set(sizes)) > 1:
            packing = packing._replace(sizes=sizes)
        return packing


class Match:
    """The layers of two models and the pairs of layers that are decided.

    Attributes:
      torch: The torch layers; rules may have divided some into parts.
      flax: The Flax layers.
      partners: Torch layer -> Flax layer, for the decided pairs.
      by_rule: The torch layers whose partner a rule names.
      by_name: The torch layers whose partner has an equal name.
      packings: The orders of packed rows that rules name.
      consecutive: Pattern of a rule -> packed layers that it sends to several Flax layers without a
        word about the order of the rows, so that the parts are taken to follow each other.
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
        self.packings: dict[Layer, Packing] = {}
        self.consecutive: dict[str, list[Layer]] = {}
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
                rule = _first_rule(rules, [names[name], layer.name])
                if rule is None:
                    continue
                paths = rule.paths
                leaf = None
                if len(paths) == 1:
                    leaf = leaves.get(paths[0])
                if leaf is not None and not _meet(layer, part, owners[paths[0]], leaf, rule):
                    owners[paths[0]] = self._alone(layer, part, owners[paths[0]], leaf)
                    del leaves[paths[0]]
                else:
                    targets = tuple(map(owners.get, paths))
                    sent.setdefault(targets, rule)
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

    def _send(self, layer: Layer, sent: Mapping[Any, Rule]) -> list[Layer]:
        """Follows the rule for one layer.

        If the rule names one Flax layer, pairs the two. If it names several, divides the rows of
        the torch layer into as many shares, and pairs each share.

        Returns:
          The shares, or the layer alone.
        """
        (targets, rule), *others = sent.items()
        text = f"the rule {rule.pattern!r} sends {layer} to"
        if rule.places:  # one packed Flax layer
            sizes = rule.sizes or (1,) * len(rule.places)
            shares = [layer]
        else:
            sizes = rule.sizes or _relative_rows(layer, targets)
            shares = layer.shares(sizes)
        for share, target, path in zip(shares, targets, rule.paths, strict=True):
            if target is None:
                self.problems.append(
                    f"{text} {path}, which is neither a leaf nor a module of the Flax tree"
                )
            elif target in self.partners.values():
                self.problems.append(f"{text} {path}, where an earlier rule sends another layer")
            else:
                self.partners[share] = target
        for _, other in others:
            self.problems.append(
                f"{text} {'|'.join(rule.paths)}, and {other.pattern!r} sends a part of it to "
                f"{'|'.join(other.paths)}: let one rule name the whole layer"
            )
        packing = rule.packing(sizes)
        if packing:
            rows = layer.shape("weight")[:1] or (0,)
            units = packing.torch_groups * sum(packing.sizes or (1,) * len(packing.order))
            if rows[0] % units:
                self.problems.append(f"{text} {units} equal blocks of rows, and it has {rows[0]}")
            self.packings.update(dict.fromkeys(shares, packing))
        elif len(shares) > 1 and rule.groups is None and not layer.is_packed_by_torch():
            self.consecutive.setdefault(rule.pattern, []).append(layer)
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
        """Divides packed Linears into shares, if enough Flax layers fit the shares.

        A convolution over single places counts as a Linear.
        """
        packed = {}
        kinds = list(grouped(layers.flax, lambda target: target.signature).values())
        for layer in layers.torch:
            weight = layer.shape("weight")
            if len(weight) < 2 or math.prod(weight[2:]) > 1:
                continue
            for sizes in _divisions(layer, kinds):
                shares = layer.shares(sizes)
                lacking = False
                for share, size in zip(shares, sizes, strict=True):
                    lacking = lacking or self._places(share, kinds) < sizes.count(size)
                if not lacking:
                    packed[layer] = shares
                    break
        _exchange(self.torch, packed)

    def _places(self, share: Layer, kinds: Iterable[Sequence[Layer]]) -> int:
        """Counts the Flax layers that a share fits."""
        places = 0
        for alike in kinds:
            if self.fits(share, alike[0]):
                places += len(alike)
        return places

    # --- by name, and by shape ------------------------------------------------------------------

    def match_names(self, *, misfits: bool = True) -> None:
        """Pairs layers of equal names.

        Args:
          misfits: Whether to pair layers whose shapes differ, too, so that the error lists them.
        """
        innermost = _shared(self.torch, self.flax)
        open_torch, open_flax = self.open()
        theirs = {}
        for target in open_flax:
            theirs[target.words, target.numbers] = target
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
        lonely = itertools.filterfalse(fitting.__contains__, torch)
        return Group(list(lonely), list(itertools.filterfalse(fitting.__contains__, flax)))

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
        ordered = {}
        for layer in self.torch:
            if layer in partners:
                ordered[layer] = partners[layer]
        return ordered

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

        torch, flax = self.open()
        ours = grouped(torch, kind)
        theirs = grouped(flax, kind)
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


def _relative_rows(layer: Layer, targets: Sequence[Layer | None]) -> Shape:
    """Returns the ratio of the rows of a packed layer's parts: that of the kernels' widths.

    If the kernels do not have as many columns in all, the parts are equal, and do not fit.
    """
    weight = layer.shape("weight")
    widths = []
    for target in targets:
        if target is not None and len(weight) > 1:
            widths.append(_width(target, math.prod(weight[1:])))
    if len(widths) < len(targets) or not all(widths) or weight[:1] != (sum(widths),):
        return (1,) * len(targets)
    unit = math.gcd(*widths)
    return tuple(width // unit for width in widths)


def _width(target: Layer, inputs: int) -> int:
    """Returns the number of outputs of a kernel; 0 if it has another number of inputs."""
    kernel = target.shape("kernel")
    width, rest = divmod(math.prod(kernel), inputs)
    if rest or not kernel:
        return 0
    return width


def _divisions(layer: Layer, kinds: Iterable[Sequence[Layer]]) -> Iterator[Shape]:
    """Yields the ratios in which a packed layer may be divided, the likeliest first.

    The parts are equal, or the queries of several heads share a key and a value.
    """
    rows, *inputs = layer.shape("weight")
    for count in _PACKED:
        if rows % count == 0:
            yield (1,) * count
    for alike in kinds:
        width = _width(alike[0], math.prod(inputs))
        if width and rows % width == 0 and rows // width > _QUERY_KEY_VALUE:
            yield (rows // width - 2, 1, 1)


def _meet(layer: Layer, part: str, target: Layer, leaf: str, rule: Rule) -> bool:
    """Returns True if a rule for a tensor and a leaf should pair their whole layers.

    That is so if joining the layers links the tensor with the leaf. It is also so if the rule's
    pattern matches the module's name, too, and joining the layers gives any link.
    """
    links = join(layer, target).links
    for link in links:
        if (link.tensor, link.leaf) == (part, leaf):
            return True
    return bool(links) and re.fullmatch(rule.pattern, layer.name) is not None


def _first_rule(rules: Sequence[tuple[str, str]], names: Sequence[str]) -> Rule | None:
    """Returns the first rule whose pattern matches one of two names, or None."""
    for pattern, template in rules:
        match = re.fullmatch(pattern, names[0]) or re.fullmatch(pattern, names[1])
        if match is None:
            continue
        try:
            return Rule.of(pattern, match.expand(template))
        except (re.error, IndexError) as error:
            raise ValueError(
                f"`rules`: the path {template!r} of {pattern!r} cannot be used ({error})."
            ) from error
    return None
