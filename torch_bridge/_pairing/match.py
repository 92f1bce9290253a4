"""Which torch layer is which Flax layer: by a rule, by name, by shape, or not at all.

A rule of the user's comes first. Else layers of equal names belong together (``layers.0.conv1`` and
``layers_0/conv1``). Else a layer goes to the only one that it fits, if its neighbours go the same
way. What is left is listed, with the rules that would say it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch_bridge._base.tensors import clean_names
from torch_bridge._pairing.kinds import IN_OUT, build, usual_form
from torch_bridge._pairing.layers import Layer, Shape, Sort
from torch_bridge._pairing.leaves import without_collection

Two: TypeAlias = tuple[Layer, Layer]
Partners: TypeAlias = dict[Layer, Layer]
# Leaves that are never the turned matrix of a Linear.
_AS_THEY_ARE = frozenset({"scale", "bias", "mean", "var", "negative_slope", "embedding"})


class Fits:
    """How well two layers fit, remembered by their shapes: a large model has few different ones."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def __call__(self, layer: Layer, target: Layer) -> int:
        """Returns 2 if two layers fit, 1 if they do as a matrix stored (in, out), else 0."""
        key = (layer.signature, target.signature)
        if key not in self._known:
            strength = 0
            if build(layer, target).fits:
                unusual = usual_form(layer, target) == IN_OUT and len(layer.shape("weight")) == 2
                strength = 1 if unusual else 2
            self._known[key] = strength
        return self._known[key]


class Match:
    """The layers of two models brought together.

    Attributes:
      torch: The layers of the one; rules may have taken some apart.
      flax: The layers of the other.
      partners: Torch layer -> Flax layer, of what is decided.
      by_rule: The torch layers whose partner a rule names.
      by_name: The torch layers whose partner has an equal name.
      fits: How well two layers fit.
      problems: A line for each rule that cannot be followed.
    """

    def __init__(
        self, torch: Sequence[Layer], flax: Sequence[Layer], rules: Sequence[tuple[str, str]]
    ) -> None:
        self.torch = list(torch)
        self.flax = list(flax)
        self.partners: Partners = {}
        self.by_rule: set[Layer] = set()
        self.by_name: set[Layer] = set()
        self.fits = Fits()
        self.problems: list[str] = []
        if rules:
            self._follow(rules)
            self.by_rule.update(self.partners)

    @property
    def open_torch(self) -> list[Layer]:
        """Lists the torch layers without a partner."""
        return [layer for layer in self.torch if layer not in self.partners]

    @property
    def open_flax(self) -> list[Layer]:
        """Lists the Flax layers without a partner."""
        taken = set(self.partners.values())
        return [layer for layer in self.flax if layer not in taken]

    # --- by a rule ------------------------------------------------------------------------------

    def _follow(self, rules: Sequence[tuple[str, str]]) -> None:
        """Pairs the layers that rules name, and tensors and leaves that their layers keep apart."""
        tensors: list[str] = []
        for layer in self.torch:
            tensors += [name for name, _ in layer.parts.values()]
        names = clean_names(tensors)
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
                target = owners.get(paths[0]) if len(paths) == 1 else None
                leaf = leaves.get(paths[0]) if target else None
                if target and leaf is not None and not _meet(layer, part, target, leaf, pattern):
                    owners[paths[0]] = self._alone(layer, part, target, leaf)
                    del leaves[paths[0]]
                    continue
                targets = tuple(owners.get(path) for path in paths)
                sent.setdefault(targets, (pattern, paths))
            if sent:
                self._send(layer, sent)

    def _alone(self, layer: Layer, part: str, target: Layer, leaf: str) -> Layer:
        """Pairs a tensor and a leaf as layers by themselves: kernels if turned, or bare ones.

        Returns the Flax layer.
        """
        shape = layer.shape(part)
        goal = target.shape(leaf)
        name = layer.parts[part][0].rpartition(".")[2]
        is_kernel = leaf not in _AS_THEY_ARE and len(shape) > 1 and goal == _turned(shape)
        is_kernel = is_kernel and (shape != goal or "weight" in name or leaf == "kernel")
        sorts: tuple[Sort, Sort] = ("weight", "kernel") if is_kernel else ("bare", "bare")
        segments = layer.segments if part in ("", "weight") else (*layer.segments, part)
        path = (*target.segments, leaf) if leaf else target.segments
        torch_key = "weight" if is_kernel else ""
        flax_key = "kernel" if is_kernel else ""
        one = Layer(segments, sorts[0], {torch_key: layer.parts.pop(part)})
        other = Layer(path, sorts[1], {flax_key: target.parts.pop(leaf)}, "/")
        _exchange(self.torch, layer, one)
        _exchange(self.flax, target, other)
        self.partners[one] = other
        return other

    def _send(
        self, layer: Layer, sent: Mapping[tuple[Layer | None, ...], tuple[str, list[str]]]
    ) -> None:
        """Pairs a layer with the one that a rule names, or its equal shares with several."""
        (targets, (pattern, paths)), *others = sent.items()
        text = f"the rule {pattern!r} sends {layer.label} to"
        shares = layer.shares(len(paths))
        place = self.torch.index(layer)
        self.torch[place : place + 1] = shares
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

    # --- by name, and by shape ------------------------------------------------------------------

    def match_names(self) -> None:
        """Pairs layers of equal names, even where shapes differ, so that this is reported.

        A series (``fc1``, ``fc2`` beside ``fc0``, ``fc1``) has equal names only if the numbers of
        one side are among those of the other.
        """
        theirs = grouped(self.open_flax, lambda layer: layer.words)
        for words, group in grouped(self.open_torch, lambda layer: layer.words).items():
            targets = {layer.numbers: layer for layer in theirs.get(words, [])}
            numbers = {layer.numbers for layer in group}
            if not (numbers <= targets.keys() or numbers >= targets.keys()):
                continue
            for layer in group:
                target = targets.get(layer.numbers)
                if target is None or not _comparable(layer, target):
                    continue
                self.partners[layer] = target
                self.by_name.add(layer)

    def drop_misfits(self) -> None:
        """Opens layers again whose partner has an equal name and another shape."""
        for layer in list(self.by_name):
            if not self.fits(layer, self.partners[layer]):
                self.by_name.remove(layer)
                del self.partners[layer]

    def match_shapes(self) -> None:
        """Pairs every layer that fits one other only, which fits no layer besides it.

        Where modules of both sides have equal names, what is in them stays in them.
        """
        while self._settle():
            pass

    def _settle(self) -> bool:
        candidates, back = self.candidates()
        settled = False
        for layer, targets in candidates.items():
            if len(targets) == 1 and len(back[targets[0]]) == 1:
                self.partners[layer] = targets[0]
                settled = True
        return settled

    def candidates(self) -> tuple[dict[Layer, list[Layer]], dict[Layer, list[Layer]]]:
        """Finds what each open layer could be, and the same seen from the other side.

        A fit as a matrix stored (in, out) counts where a layer has no other.
        """
        torch = self.open_torch
        flax = self.open_flax
        inside = _shared_modules(self.torch, self.flax)
        candidates: dict[Layer, list[Layer]] = {layer: [] for layer in torch}
        back: dict[Layer, list[Layer]] = {target: [] for target in flax}
        theirs = grouped(flax, lambda target: (inside(target), target.signature))
        mine = grouped(torch, lambda layer: (inside(layer), layer.signature))
        for (module, _), layers in mine.items():
            strengths: dict[int, list[Layer]] = {1: [], 2: []}
            for (place, _), targets in theirs.items():
                strength = self.fits(layers[0], targets[0]) if place == module else 0
                if strength:
                    strengths[strength] += targets
            for layer in layers:
                candidates[layer] = strengths[2] or strengths[1]
                for target in candidates[layer]:
                    back[target].append(layer)
        return candidates, back

    def contradictions(self) -> list[str]:
        """Lists the series whose numbers go both ways: one block's layers land in several blocks.

        A number of torch may stand for several of Flax, and the other way round, but not both.
        """
        meetings: dict[Any, dict[tuple[int, int], Two]] = {}
        for layer, target in self.partners.items():
            if layer in self.by_rule:
                continue
            for series, number in _series(layer).items():
                for other, place in _series(target).items():
                    meeting = meetings.setdefault((series, other), {})
                    meeting.setdefault((number, place), (layer, target))
        lines: list[str] = []
        for (series, other), meeting in meetings.items():
            crossing = _crossing(meeting)
            if crossing:
                shown = ", but ".join(f"{a.label} is {b.label}" for a, b in crossing)
                lines.append(
                    f"{'.'.join(series)} does not go to {'/'.join(other)} block by block: by shape "
                    f"and name {shown}. Say with rules which block is which"
                )
        return lines


def pair_in_order(mine: Sequence[Layer], theirs: Sequence[Layer]) -> list[Two]:
    """Pairs the layers of two series in the order of their numbers, if these are nested alike.

    Numbers need not be equal: ``0, 2, 4`` in a Sequential with activations between is ``Dense_0``,
    ``Dense_1``, ``Dense_2``. Nothing if the two sides cannot be put in correspondence.
    """
    if len(mine) != len(theirs) or not mine:
        return []
    left = sorted(mine, key=lambda layer: layer.numbers)
    right = sorted(theirs, key=lambda layer: layer.numbers)
    ours = _nesting([layer.numbers for layer in left])
    others = _nesting([layer.numbers for layer in right])
    flat = len(ours[0]) == 1 or len(others[0]) == 1
    if len(set(ours)) < len(ours) or len(set(others)) < len(others):
        return []
    if ours != others and not flat:
        return []
    return list(zip(left, right, strict=True))


def common_rule(two: Sequence[Two]) -> tuple[str, str] | None:
    """Writes one rule that sends each layer of a series to its own, where the numbers allow it."""
    name, other = (layer.name for layer in two[-1])
    if len(two) == 1:
        return re.escape(name), other
    varies: list[bool] = []
    for column in zip(*(layer.numbers for layer, _ in two), strict=True):
        varies.append(len(set(column)) > 1)
    numbers = re.findall(r"\d+", name)
    varying = [number for number, varied in zip(numbers, varies, strict=True) if varied]
    turns = iter(varies)
    pattern = re.sub(r"\d+", lambda n: r"(\d+)" if next(turns) else n[0], re.escape(name))

    def group_of(number: re.Match[str]) -> str:
        if number[0] in varying:
            return f"\\{varying.index(number[0]) + 1}"
        return number[0]

    path = re.sub(r"\d+", group_of, other)
    for layer, target in two:
        match = re.fullmatch(pattern, layer.name)
        if match is None or match.expand(path) != target.name:
            return None
    return pattern, path


def grouped(layers: Iterable[Layer], key: Callable[[Layer], Any]) -> dict[Any, list[Layer]]:
    """Groups layers by what a function says of them, in their order."""
    groups: dict[Any, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(key(layer), []).append(layer)
    return groups


def _turned(shape: Shape) -> Shape:
    """Returns the shape of a kernel (out, in, *space) as Flax has it."""
    return (*shape[2:], shape[1], shape[0])


def _exchange(layers: list[Layer], whole: Layer, alone: Layer) -> None:
    """Puts a new layer before the one that it was taken from, or in its place if that is empty."""
    place = layers.index(whole)
    stop = place if whole.parts else place + 1
    layers[place:stop] = [alone]


def _meet(layer: Layer, part: str, target: Layer, leaf: str, pattern: str) -> bool:
    """Tells whether a tensor and a leaf that a rule names are paired where their layers are.

    A pattern that names the module too speaks of the layer, whichever leaf the rule gives.
    """
    pairs = build(layer, target).pairs
    for pair in pairs:
        if (pair.torch_name, pair.path) == (layer.parts[part][0], target.parts[leaf][0]):
            return True
    return bool(pairs) and re.fullmatch(pattern, layer.name) is not None


def _first_rule(rules: Sequence[tuple[str, str]], names: Sequence[str]) -> tuple[str, list[str]]:
    """Finds the first rule that matches one of some names, and expands its paths; else none."""
    for pattern, template in rules:
        matches = [re.fullmatch(pattern, name) for name in names]
        match = next((m for m in matches if m), None)
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


def _comparable(layer: Layer, target: Layer) -> bool:
    """Tells whether two layers of equal names can be one: they have a part in common."""
    built = build(layer, target)
    return bool(built.pairs or built.mis_shaped)


def _shared_modules(torch: Sequence[Layer], flax: Sequence[Layer]) -> Callable[[Layer], Any]:
    """Returns a function that finds the innermost module around a layer that both sides have."""
    modules: list[set[Any]] = []
    for side in (torch, flax):
        names: set[Any] = set()
        for layer in side:
            for length in range(1, len(layer.segments)):
                names.add(words_key(layer.segments[:length]))
        modules.append(names)
    both = modules[0] & modules[1]

    def inside(layer: Layer) -> Any:
        for length in range(len(layer.segments) - 1, 0, -1):
            key = words_key(layer.segments[:length])
            if key in both:
                return key
        return ()

    return inside


def words_key(segments: tuple[str, ...]) -> Any:
    """Returns what is equal for equal names: ``layers.0`` and ``layers_0``."""
    layer = Layer(segments, "bare", {})
    return layer.words, layer.numbers


def _series(layer: Layer) -> dict[tuple[str, ...], int]:
    """Returns for every number of a name what is before it, and the number."""
    places: dict[Any, int] = {}
    before: list[str] = []
    for word in layer.words:
        if word == "#":
            number = layer.numbers[len(places)]
            places[(*before, "#")] = number
            word = str(number)
        before.append(word)
    return places


def _crossing(meeting: Mapping[tuple[int, int], Two]) -> list[Two]:
    """Finds three meetings of which the second shares a number with each of the others."""
    by_first: dict[int, list[tuple[int, int]]] = {}
    by_second: dict[int, list[tuple[int, int]]] = {}
    for key in meeting:
        by_first.setdefault(key[0], []).append(key)
        by_second.setdefault(key[1], []).append(key)
    for key, two in meeting.items():
        if len(by_first[key[0]]) > 1 and len(by_second[key[1]]) > 1:
            first = next(other for other in by_first[key[0]] if other != key)
            return [two, meeting[first]]
    return []


def _nesting(numbers: Sequence[Shape]) -> list[Shape]:
    """Turns sorted numbers into ranks within their parent, without positions that never vary."""
    varying: list[int] = []
    for k in range(len(numbers[0])):
        if len({index[k] for index in numbers}) > 1:
            varying.append(k)
    kept: list[Shape] = []
    for index in numbers:
        kept.append(tuple(index[k] for k in varying))
    ranked: list[Shape] = []
    for index in kept:
        ranks: list[int] = []
        for depth, number in enumerate(index):
            siblings = {other[depth] for other in kept if other[:depth] == index[:depth]}
            ranks.append(sorted(siblings).index(number))
        ranked.append(tuple(ranks))
    return ranked
