"""Which torch layer is which Flax layer: by a rule, by name, by shape, or not at all.

A rule of the user's comes first. Then layers of equal names belong together (``layers.0.conv1`` and
``layers_0/conv1``), and what is in modules of equal names stays in them. Then a layer goes where it
has to, if every layer shall have a place. What is left open lies in groups of alike layers.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch_bridge._base.tensors import clean_names
from torch_bridge._pairing.kinds import IN_OUT, build, forms_of
from torch_bridge._pairing.layers import Layer
from torch_bridge._pairing.leaves import without_collection, words_of

Partners: TypeAlias = dict[Layer, Layer]
_T = TypeVar("_T")
_PACKED = (3, 2, 4)  # parts of a packed Linear: query, key and value; key and value; gates
UNUSUAL = 1
FITS = 2


class Group(NamedTuple):
    """Alike layers of both sides, of which nothing tells which is which."""

    torch: list[Layer]
    flax: list[Layer]

    def joined(self, other: Group) -> Group:
        """Returns the layers of both groups, each once."""
        flax = dict.fromkeys(self.flax + other.flax)
        return Group(self.torch + other.torch, list(flax))

    def without(self, partners: Mapping[Layer, Layer]) -> Group:
        """Returns the layers that are not paired."""
        taken = set(partners.values())
        torch = [layer for layer in self.torch if layer not in partners]
        flax = [target for target in self.flax if target not in taken]
        return Group(torch, flax)

    def in_order(self) -> list[tuple[Layer, Layer]]:
        """Pairs layers that differ in their numbers only, in the order of these; else none do."""
        if len(self.torch) != len(self.flax):
            return []
        sides: list[list[Layer]] = []
        for layers in self:
            if len({layer.words for layer in layers}) > 1:
                return []
            sides.append(sorted(layers, key=lambda layer: layer.numbers))
        return list(zip(*sides, strict=True))


class Match:
    """The layers of two models brought together.

    Attributes:
      torch: The layers of the one; rules may have taken some apart.
      flax: The layers of the other.
      partners: Torch layer -> Flax layer, of what is decided.
      by_rule: The torch layers whose partner a rule names.
      by_name: The torch layers whose partner has an equal name.
      problems: A line for each rule that cannot be followed.
      plain: Whether a layer that fits in its usual form does not go elsewhere in another.
    """

    def __init__(
        self, torch: Sequence[Layer], flax: Sequence[Layer], rules: Sequence[tuple[str, str]]
    ) -> None:
        self.torch = list(torch)
        self.flax = list(flax)
        self.partners: Partners = {}
        self.by_name: set[Layer] = set()
        self.problems: list[str] = []
        self.plain = False
        self._fits: dict[Hashable, int] = {}
        if rules:
            self._follow(rules)
        self.by_rule = set(self.partners)

    def fits(self, layer: Layer, target: Layer) -> int:
        """Tells whether two layers fit; `UNUSUAL` if only as a matrix stored (in, out).

        It is remembered by their shapes: a large model has few different ones.
        """
        key = (layer.signature, target.signature)
        if key not in self._fits:
            strength = 0
            if build(layer, target).fits:
                strength = FITS
                is_matrix = len(layer.shape("weight")) == 2
                if is_matrix and forms_of(layer, target)[:1] == [IN_OUT]:
                    strength = UNUSUAL
            self._fits[key] = strength
        return self._fits[key]

    # --- by a rule ------------------------------------------------------------------------------

    def _follow(self, rules: Sequence[tuple[str, str]]) -> None:
        """Pairs the layers that rules name, and tensors and leaves that their layers keep apart."""
        names = clean_names(list(itertools.chain(*map(Layer.tensors, self.torch))))
        owners = {"/".join(layer.segments): layer for layer in self.flax}
        leaves: dict[str, str] = {}
        for target in self.flax:
            for leaf, (path, _) in target.parts.items():
                owners["/".join(path)] = target
                leaves["/".join(path)] = leaf
        for layer in self.torch.copy():
            sent: dict[tuple[Layer | None, ...], tuple[str, list[str]]] = {}
            for part, (name, _) in list(layer.parts.items()):
                pattern, paths = _first_rule(rules, [names[name], layer.name])
                if not paths:
                    continue
                targets = tuple(map(owners.get, paths))
                if len(paths) == 1 and paths[0] in leaves:
                    target = owners[paths[0]]
                    leaf = leaves[paths[0]]
                    if not _meet(layer, part, target, leaf, pattern):
                        owners[paths[0]] = self._alone(layer, part, target, leaf)
                        del leaves[paths[0]]
                        continue
                sent.setdefault(targets, (pattern, paths))
            if sent:
                self._send(layer, sent)

    def _alone(self, layer: Layer, part: str, target: Layer, leaf: str) -> Layer:
        """Pairs a tensor and a leaf as layers by themselves, and returns the Flax layer."""
        one = layer.single(part)
        other = target.single(leaf)
        del layer.parts[part]
        del target.parts[leaf]
        for side, single, whole in ((self.torch, one, layer), (self.flax, other, target)):
            side.insert(side.index(whole), single)
            if not whole.parts:
                side.remove(whole)
        self.partners[one] = other
        return other

    def _send(
        self, layer: Layer, sent: Mapping[tuple[Layer | None, ...], tuple[str, list[str]]]
    ) -> None:
        """Pairs a layer with the one that a rule names, or its equal shares with several."""
        (targets, (pattern, paths)), *others = sent.items()
        text = f"the rule {pattern!r} sends {layer.label} to"
        shares = layer.shares(len(paths))
        exchange(self.torch, layer, shares)
        for share, target, path in zip(shares, targets, paths, strict=True):
            if target is None:
                line = "which is neither a leaf nor a module of the Flax tree"
                self.problems.append(f"{text} {path}, {line}")
            elif target in self.partners.values():
                self.problems.append(f"{text} {path}, where an earlier rule sends another")
            else:
                self.partners[share] = target
        for _, (other, elsewhere) in others:
            self.problems.append(
                f"{text} {'|'.join(paths)}, and {other!r} a part of it to {'|'.join(elsewhere)}: "
                "let one rule name the whole layer"
            )

    def take_apart(self, layers: Group) -> None:
        """Takes layers apart into their parts."""
        for parted, side in zip(layers, (self.torch, self.flax), strict=True):
            for layer in parted:
                if len(layer.parts) > 1 and layer.sort in ("weight", "kernel", "norm", "bare"):
                    exchange(side, layer, [layer.single(part) for part in layer.parts])

    def take_shares(self, layers: Group) -> None:
        """Takes packed Linears apart, of which not the whole but so many parts have a place."""
        for layer in layers.torch:
            weight = layer.shape("weight")
            for count in _PACKED:
                if len(weight) != 2 or weight[0] % count:
                    continue
                shares = layer.shares(count)
                fitting = 0
                for target in layers.flax:
                    fitting += self.fits(shares[0], target) > 0
                if fitting >= count:
                    exchange(self.torch, layer, shares)
                    break

    # --- by name, and by shape ------------------------------------------------------------------

    def match_names(self, *, misfits: bool = True) -> None:
        """Pairs layers of equal names.

        Args:
          misfits: Whether to pair those whose shapes differ, too, so that this is reported.
        """
        innermost = _shared(self.torch, self.flax, 1, set())
        open_torch, open_flax = self.open()
        theirs = {(target.words, target.numbers): target for target in open_flax}
        for layer in open_torch:
            key = (layer.words, layer.numbers)
            target = theirs.get(key)
            if target is None or layer.share or innermost(layer.segments) != key:
                continue
            built = build(layer, target)
            if built.fits or (misfits and (built.pairs or built.mis_shaped)):
                self.partners[layer] = target
                self.by_name.add(layer)

    def open(self) -> Group:
        """Returns the layers without a partner."""
        return Group(self.torch, self.flax).without(self.partners)

    def match_shapes(self) -> None:
        """Pairs every layer that has one place only, or is the only one for a place."""
        for region in self._regions():
            forced = _forced(self._alike(region))
            while forced:
                self.partners.update(forced)
                region = region.without(forced)
                forced = _forced(self._alike(region))

    def groups(self) -> list[Group]:
        """Lists the groups of layers that are open among each other."""
        groups: list[Group] = []
        for region in self._regions():
            joined: list[Group] = []
            for alike in self._alike(region):
                apart: list[Group] = []
                for other in joined:
                    if set(other.flax).isdisjoint(alike.flax):
                        apart.append(other)
                    else:
                        alike = alike.joined(other)
                joined = apart
                if alike.flax:
                    joined.append(alike)
            groups += joined
        return groups

    def lonely(self) -> Group:
        """Returns the layers that fit nothing."""
        torch: list[Layer] = []
        reached: set[Layer] = set()
        for region in self._regions():
            for alike in self._alike(region):
                reached.update(alike.flax)
                if not alike.flax:
                    torch += alike.torch
        flax = [target for target in self.open().flax if target not in reached]
        return Group(torch, flax)

    def _regions(self) -> Iterator[Group]:
        """Lists what is open by the innermost module around it that both sides have.

        Blocks may be numbered the other way round, so that numbers count only where layers in such
        a module have equal names.
        """
        named: set[Any] = set()
        for layer in self.by_name:
            for length in range(len(layer.segments)):
                named.add(words_of(layer.segments[:length]))
        innermost = _shared(self.torch, self.flax, 0, named)
        both = self.open()
        theirs = grouped(both.flax, lambda target: innermost(target.segments[:-1]))
        ours = grouped(both.torch, lambda layer: innermost(layer.segments[:-1]))
        for module in ours | theirs:
            yield Group(ours.get(module, []), theirs.get(module, []))

    def _alike(self, region: Group) -> list[Group]:
        """Lists the layers of torch that are alike, each time with those of Flax that they fit."""
        groups: list[Group] = []
        theirs = grouped(region.flax, lambda target: target.signature)
        for layers in grouped(region.torch, lambda layer: layer.signature).values():
            fitting: dict[int, list[Layer]] = {0: [], UNUSUAL: [], FITS: []}
            for targets in theirs.values():
                fitting[self.fits(layers[0], targets[0])] += targets
            if self.plain and fitting[FITS]:
                fitting[UNUSUAL] = []
            groups.append(Group(layers, fitting[FITS] + fitting[UNUSUAL]))
        return groups


def grouped(members: Iterable[_T], key: Callable[[_T], Any]) -> dict[Any, list[_T]]:
    """Groups layers by what a function says of them, in their order."""
    groups: dict[Any, list[_T]] = {}
    for member in members:
        groups.setdefault(key(member), []).append(member)
    return groups


def exchange(layers: list[Layer], whole: Layer, parts: Sequence[Layer]) -> None:
    """Puts layers in the place of the one that they were taken from."""
    place = layers.index(whole)
    layers[place : place + 1] = parts


def _forced(groups: Sequence[Group]) -> Partners:
    """Finds the layers that have one place only, and the places that one layer only fits."""
    fitting: Counter[Layer] = Counter()
    last: Partners = {}
    for alike in groups:
        for target in alike.flax:
            fitting[target] += len(alike.torch)
            last[target] = alike.torch[0]
    forced = {last[target]: target for target, count in fitting.items() if count == 1}
    only: dict[Layer, list[Layer]] = {}
    for alike in groups:
        if len(alike.torch) == len(alike.flax) == 1:
            only.setdefault(alike.flax[0], []).append(alike.torch[0])
    for target, layers in only.items():
        if len(layers) == 1 and target not in forced.values():
            forced[layers[0]] = target
    return forced


def _shared(
    torch: Iterable[Layer], flax: Iterable[Layer], layers: int, named: Collection[Any]
) -> Callable[[tuple[str, ...]], Any]:
    """Returns a function that finds the longest beginning of a name that both sides have.

    A series has equal names only if the numbers of one side are among those of the other.
    ``fc1``, ``fc2`` beside ``fc0``, ``fc1`` are not equal, nor is what such modules contain.

    Args:
      torch: The layers of the one side.
      flax: The layers of the other.
      layers: 1 for names of modules and layers; 0 for those of modules alone, without numbers.
      named: Modules that count in spite of their numbers.
    """
    sides: list[dict[Any, set[Any]]] = []
    for members in (torch, flax):
        side: dict[Any, set[Any]] = {}
        for layer in members:
            for length in range(len(layer.segments) + layers):
                words, numbers = words_of(layer.segments[:length])
                side.setdefault(words, set()).add(numbers)
        sides.append(side)
    ours, theirs = sides
    both: set[Any] = set()
    other_series: set[Any] = set()
    for words in ours.keys() & theirs.keys():
        numbers = ours[words] & theirs[words]
        if numbers in (ours[words], theirs[words]):
            is_series = len(ours[words] | theirs[words]) > 1 and not layers
            for one in numbers:
                if not is_series or (words, one) in named:
                    both.add((words, one))
        else:
            other_series.add(words)

    def innermost(segments: tuple[str, ...]) -> Any:
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
    """Tells whether a tensor and a leaf that a rule names are paired where their layers are.

    A pattern that names the module too speaks of the layer, whichever leaf the rule gives.
    """
    pairs = build(layer, target).pairs
    named = (layer.parts[part][0], target.parts[leaf][0])
    for pair in pairs:
        if (pair.torch_name, pair.path) == named:
            return True
    return bool(pairs) and re.fullmatch(pattern, layer.name) is not None


def _first_rule(rules: Sequence[tuple[str, str]], names: Sequence[str]) -> tuple[str, list[str]]:
    """Finds the first rule that matches one of some names, and expands its paths; else none."""
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
        targets: list[str] = []
        for path in paths:
            words = tuple(path.strip("/").split("/"))
            targets.append("/".join(without_collection(words)))
        return pattern, targets
    return "", []
