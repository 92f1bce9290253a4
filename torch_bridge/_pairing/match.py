"""Which torch layer is which Flax layer: by a rule, by name, by number, or not at all.

A rule of the user's comes first. Else layers of equal names belong together (``layers.0.conv1`` and
``layers_0/conv1``, whatever the case). Else layers whose names differ in numbers only form a group,
and a group goes to the only group of the other side that fits, in the order of the numbers. What is
left is listed, with the rules that would say it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch_bridge._base.tensors import clean_names
from torch_bridge._pairing.build import build, orders
from torch_bridge._pairing.layers import Kind, Layer, Shape
from torch_bridge._pairing.leaves import without_collection

_EMBEDDING_WORDS = frozenset(
    {"emb", "embed", "embedder", "embedding", "embeddings", "wte", "wpe", "tok", "token", "tokens"}
)
# Leaves that are never the turned matrix of a Linear.
_AS_THEY_ARE = frozenset({"scale", "bias", "mean", "var", "negative_slope", "embedding"})
Two: TypeAlias = tuple[Layer, Layer]


class Match:
    """The layers of two models brought together.

    Attributes:
      torch: The layers of the one; rules may have taken some apart. Likewise `flax`.
      partners: Torch layer -> Flax layer.
      ambiguous: A line for each group that fits several, and for each rule that cannot be followed.
    """

    def __init__(
        self, torch: Sequence[Layer], flax: Sequence[Layer], rules: Sequence[tuple[str, str]]
    ) -> None:
        self.torch, self.flax = list(torch), list(flax)
        self.partners: dict[Layer, Layer] = {}
        self.ambiguous: list[str] = []
        self._undecided: set[Layer] = set()
        self._known_fits: dict[Hashable, int] = {}
        if rules:
            self._follow(rules)
        self._by_name()
        self._by_number()

    @property
    def open_torch(self) -> list[Layer]:
        """The torch layers without a partner, of which no line is in `ambiguous`."""
        done = self.partners.keys() | self._undecided
        return [layer for layer in self.torch if layer not in done]

    @property
    def open_flax(self) -> list[Layer]:
        """Likewise of Flax."""
        done = {*self.partners.values()} | self._undecided
        return [layer for layer in self.flax if layer not in done]

    # --- by a rule ------------------------------------------------------------------------------

    def _follow(self, rules: Sequence[tuple[str, str]]) -> None:
        """Pairs the layers that rules name, and tensors and leaves that their layers keep apart."""
        names = clean_names([name for layer in self.torch for name, _ in layer.parts.values()])
        owners = {"/".join(layer.segments): layer for layer in self.flax}
        leaves: dict[str, str] = {}
        for target in self.flax:
            for leaf, (path, _) in target.parts.items():
                place = "/".join(path)
                owners[place], leaves[place] = target, leaf
        for layer in self.torch.copy():
            sent: dict[tuple[Layer | None, ...], tuple[str, list[str]]] = {}
            for part, (name, _) in [*layer.parts.items()]:
                pattern, paths = _first_rule(rules, [names[name], layer.name])
                place = paths[0] if len(paths) == 1 else ""
                target, leaf = owners.get(place), leaves.get(place)
                if target and leaf is not None and not _meet(layer, part, target, leaf, pattern):
                    owners[place] = self._alone(layer, part, target, leaves.pop(place))
                elif paths:
                    sent.setdefault(tuple(map(owners.get, paths)), (pattern, paths))
            if sent:
                self._send(layer, sent)

    def _alone(self, layer: Layer, part: str, target: Layer, leaf: str) -> Layer:
        """Pairs a tensor and a leaf as layers of their own: kernels if it may be turned, or arrays.

        Returns the Flax layer.
        """
        ours, theirs = layer.shape(part), target.shape(leaf)
        named = "weight" in layer.parts[part][0].rpartition(".")[2] or leaf == "kernel"
        usual, swapped = orders(ours, theirs)
        turns = leaf not in _AS_THEY_ARE and (usual or (swapped and len(ours) > 2))
        is_kernel = turns and (ours != theirs or named)
        kind: Kind = "weight" if is_kernel else "array"
        segments = layer.segments if part in ("", "weight") else (*layer.segments, part)
        path = (*target.segments, leaf) if leaf else target.segments
        own = Layer(segments, kind, {"weight" if is_kernel else "": layer.parts.pop(part)})
        other = Layer(path, kind, {"kernel" if is_kernel else "": target.parts.pop(leaf)}, "/")
        for layers, whole, alone in ((self.torch, layer, own), (self.flax, target, other)):
            place = layers.index(whole)
            layers[place : place + (not whole.parts)] = [alone]
        self.partners[own] = other
        return other

    def _send(
        self, layer: Layer, sent: Mapping[tuple[Layer | None, ...], tuple[str, list[str]]]
    ) -> None:
        """Pairs a layer with the one that a rule names, or its equal shares with several."""
        (targets, (pattern, paths)), *others = sent.items()
        text = f"the rule {pattern!r} sends {layer.name or '(root)'} to"
        shares, place = layer.shares(len(paths)), self.torch.index(layer)
        self.torch[place : place + 1] = shares
        for share, target, path in zip(shares, targets, paths, strict=True):
            if target is None:
                line = "which is neither a leaf nor a module of the Flax tree"
                self.ambiguous.append(f"{text} {path}, {line}")
            elif target in self.partners.values():
                self.ambiguous.append(f"{text} {path}, where an earlier rule sends another")
            else:
                self.partners[share] = target
        self.ambiguous += [
            f"{text} {'|'.join(paths)}, and {other!r} a part of it to {'|'.join(elsewhere)}: let "
            "one rule name the whole layer"
            for _, (other, elsewhere) in others
        ]

    # --- by name, and by number -----------------------------------------------------------------

    def _by_name(self) -> None:
        """Pairs layers of one kind whose names agree but for the numbers.

        Their numbers need not be equal where both sides have as many. Those of exactly equal names
        are paired even if their shapes differ, so that the difference is reported.
        """
        theirs = _grouped(self.open_flax, lambda layer: (layer.words, layer.kind))
        for key, group in _grouped(self.open_torch, lambda a: (a.words, a.kind)).items():
            targets = theirs.get(key, [])
            two = _in_order(group, targets, same_words=True)
            if not two:
                by_number = {layer.numbers: layer for layer in targets}
                two = [(a, by_number[a.numbers]) for a in group if a.numbers in by_number]
            if all(a.exact == b.exact for a, b in two) or all(self._fit(a, b) for a, b in two):
                self.partners.update(two)

    def _by_number(self) -> None:
        """Pairs groups with the only ones that fit; where several do, shapes and names decide.

        Of what stays undecided it is said where it could go.
        """
        while True:
            mine, theirs = (
                _grouped(side, lambda a: (a.words, a.signature)).values()
                for side in (self.open_torch, self.open_flax)
            )
            found: list[tuple[tuple[int, ...], list[Layer], list[Layer], list[Two]]] = []
            for group, targets in itertools.product(mine, theirs):
                if fit := self._fit(group[0], targets[0]):
                    two = _in_order(group, targets, same_words=False)
                    rank = (fit, *_said(group[0], targets[0])) if two else ()
                    found.append((rank, group, targets, two))
            settled = [
                pair
                for rank, group, targets, two in found
                if all(rank > r for r, g, t, _ in found if (g is group) != (t is targets))
                for pair in two
            ]
            if not settled:
                break
            self.partners.update(settled)
        for group in mine:
            if fitting := [targets for _, g, targets, _ in found if g is group]:
                self._list(group, fitting)

    def _fit(self, layer: Layer, target: Layer) -> int:
        """2 if they fit, 1 if they do as a matrix stored (in, out), else 0."""
        key = (layer.signature, target.signature)  # a large model has few different ones
        if key not in self._known_fits:
            found = build(layer, target)
            conv1d = any(pair.kind == "conv1d.weight" for pair in found.pairs)
            self._known_fits[key] = found.fits * (1 if conv1d else 2)
        return self._known_fits[key]

    def _list(self, group: Sequence[Layer], fitting: Sequence[Sequence[Layer]]) -> None:
        """Says of a group where it could go, and the rules for it."""
        self._undecided.update(group, *fitting)
        rules = [rule for targets in fitting if (rule := _rule(group, targets))]
        if len(rules) == len(fitting):
            could_be = {rules[0][0]: [path for _, path in rules]}
        else:
            names = [layer.name or "(root)" for targets in fitting for layer in targets]
            could_be = {layer.name or "(root)": names for layer in group}
        shapes = ", ".join(str(shape) for _, shape in group[0].parts.values())
        for pattern, names in could_be.items():
            shown = " or ".join(names[:4]) + (" or ..." if len(names) > 4 else "")
            self.ambiguous.append(
                f"{pattern} {shapes} could be {shown}: say which, as in "
                f"rules={{{pattern!r}: {names[0]!r}}}"
            )


def _meet(layer: Layer, part: str, target: Layer, leaf: str, pattern: str) -> bool:
    """Whether a tensor and a leaf that a rule names are paired where their layers are.

    A pattern that names the module too speaks of the layer, whichever leaf the rule gives.
    """
    two = layer.parts[part][0], target.parts[leaf][0]
    pairs = [(pair.torch_name, pair.path) for pair in build(layer, target).pairs]
    return two in pairs or (bool(pairs) and re.fullmatch(pattern, layer.name) is not None)


def _first_rule(rules: Sequence[tuple[str, str]], names: Sequence[str]) -> tuple[str, list[str]]:
    """The rule that decides, the first to match one of some names, and the paths that it gives.

    Of names that no rule matches no path.
    """
    for pattern, template in rules:
        found = next((m for name in names if (m := re.fullmatch(pattern, name))), None)
        if found:
            try:
                paths = found.expand(template).split("|")
            except (re.error, IndexError) as error:
                raise ValueError(
                    f"`rules`: the path {template!r} of {pattern!r} cannot be used ({error})."
                ) from error
            words = (tuple(path.strip("/").split("/")) for path in paths)
            return pattern, ["/".join(without_collection(path)) for path in words]
    return "", []


def _grouped(layers: Iterable[Layer], key: Callable[[Layer], Any]) -> dict[Any, list[Layer]]:
    groups: dict[Any, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(key(layer), []).append(layer)
    return groups


def _said(layer: Layer, target: Layer) -> tuple[bool, int]:
    """What the names say for two layers: that both are embeddings, or none, and equal words."""
    embeds = bool(_EMBEDDING_WORDS & set(layer.words)) == ("embedding" in target.parts)
    return embeds, len(layer.plain & target.plain)


def _in_order(mine: Sequence[Layer], theirs: Sequence[Layer], *, same_words: bool) -> list[Two]:
    """The layers side by side in the order of their numbers, if these are nested alike.

    Numbers need not be equal: ``0, 2, 4`` in a Sequential with activations between is ``Dense_0``,
    ``Dense_1``, ``Dense_2``. Nothing if the two sides cannot be put in correspondence.
    """
    if len(mine) != len(theirs) or not mine:
        return []
    left, right = (sorted(side, key=lambda layer: layer.numbers) for side in (mine, theirs))
    ours, others = (_nesting([layer.numbers for layer in side]) for side in (left, right))
    flat = not same_words and (len(ours[0]) == 1 or len(others[0]) == 1)
    distinct = all(len(set(side)) == len(side) for side in (ours, others))
    return list(zip(left, right, strict=True)) if distinct and (ours == others or flat) else []


def _nesting(numbers: Sequence[Shape]) -> list[Shape]:
    """Sorted numbers as ranks within their parent, without the positions that never vary."""
    varying = [k for k in range(len(numbers[0])) if len({index[k] for index in numbers}) > 1]
    kept = [tuple(index[k] for k in varying) for index in numbers]
    ranked = []
    for index in kept:
        siblings = (
            sorted({other[depth] for other in kept if other[:depth] == index[:depth]})
            for depth in range(len(index))
        )
        ranked.append(tuple(s.index(n) for s, n in zip(siblings, index, strict=True)))
    return ranked


def _rule(mine: Sequence[Layer], theirs: Sequence[Layer]) -> tuple[str, str] | None:
    """One rule that sends a group to another, where the numbers of the one are in the other."""
    two = _in_order(mine, theirs, same_words=True)
    if not two:
        return None
    ours, other = (layer.name for layer in two[-1])
    if len(two) == 1:
        return ours, other
    columns = zip(*(layer.numbers for layer, _ in two), strict=True)
    varies = [len(set(column)) > 1 for column in columns]
    found = [n for n, vary in zip(re.findall(r"\d+", ours), varies, strict=True) if vary]
    turns = iter(varies)
    pattern = re.sub(r"\d+", lambda n: r"(\d+)" if next(turns) else n[0], re.escape(ours))
    path = re.sub(r"\d+", lambda n: f"\\{found.index(n[0]) + 1}" if n[0] in found else n[0], other)
    sent = [(re.fullmatch(pattern, a.name), b.name) for a, b in two]
    return (pattern, path) if all(m and m.expand(path) == name for m, name in sent) else None
