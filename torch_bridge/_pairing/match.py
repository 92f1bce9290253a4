"""Which torch layer is which Flax layer: by a rule, by name, by number, or not at all.

A rule of the user's comes first. Else layers of equal names belong together (``layers.0.conv1`` and
``layers_0/conv1``, whatever the case). Else layers whose names differ in numbers only form a group,
and a group goes to the only group of the other side that fits, in the order of the numbers. What is
left is listed, with the rules that would say it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch_bridge._base.tensors import clean_names
from torch_bridge._pairing.build import Built, build, orders
from torch_bridge._pairing.layers import Kind, Layer, Shape
from torch_bridge._pairing.leaves import without_collection

_EMBEDDING_WORDS = frozenset(
    {"emb", "embed", "embedder", "embedding", "embeddings", "wte", "wpe", "tok", "token", "tokens"}
)
# Leaves that are never the turned matrix of a Linear.
_AS_THEY_ARE = frozenset({"scale", "bias", "mean", "var", "negative_slope", "embedding"})
Path: TypeAlias = tuple[str, ...]
Two: TypeAlias = tuple[Layer, Layer]
Part: TypeAlias = tuple[Layer, str]


class Match:
    """The layers of two models brought together.

    Attributes:
      torch: The layers of the one; rules may have taken some apart. Likewise `flax`.
      partners: Torch layer -> Flax layer.
      ambiguous: A line for each group that fits several, and for each rule that cannot be followed.
      undecided: The layers of these groups.
    """

    def __init__(
        self, torch: Sequence[Layer], flax: Sequence[Layer], rules: Sequence[tuple[str, str]]
    ) -> None:
        self.torch, self.flax = list(torch), list(flax)
        self.partners: dict[Layer, Layer] = {}
        self.ambiguous: list[str] = []
        self.undecided: set[Layer] = set()
        self._known_fits: dict[Hashable, int] = {}
        if rules:
            self._follow(rules)
        self._by_name()
        while self.open_torch and self._by_number():
            pass
        self._list_the_rest()

    @property
    def open_torch(self) -> list[Layer]:
        """The torch layers without a partner."""
        return [layer for layer in self.torch if layer not in self.partners]

    @property
    def open_flax(self) -> list[Layer]:
        """The Flax layers without a partner."""
        taken = set(self.partners.values())
        return [layer for layer in self.flax if layer not in taken]

    # --- by a rule ------------------------------------------------------------------------------

    def _follow(self, rules: Sequence[tuple[str, str]]) -> None:
        """Pairs the layers that rules name, and tensors and leaves that their layers keep apart."""
        names = clean_names([name for layer in self.torch for name, _ in layer.parts.values()])
        targets = self._targets()
        taken: dict[Part, Layer] = {}
        for layer in self.torch:
            for key, (name, _) in layer.parts.items():
                _, paths = _first_rule(rules, [names[name], layer.name])
                target, leaf = targets.get(paths[0] if len(paths) == 1 else (), (None, ""))
                if target is None or leaf is None or (target, leaf) in taken:
                    continue
                of_arrays = layer.kind == "array" and layer.shape("") != target.shape(leaf)
                if layer.kind != target.kind or of_arrays:  # parts that cannot meet as layers
                    mine, other = _alone(layer, key, target, leaf)
                    taken[layer, key], taken[target, leaf] = mine, other
                    self.partners[mine] = other
        self.torch, self.flax = _without(self.torch, taken), _without(self.flax, taken)
        targets = self._targets()
        for layer in self.open_torch:
            own = [*(names[name] for name, _ in layer.parts.values()), layer.name]
            pattern, paths = _first_rule(rules, own)
            shares = [layer]
            if len(paths) > 1:
                shares = [
                    Layer(layer.segments, layer.kind, layer.parts, share=(k, len(paths)))
                    for k in range(len(paths))
                ]
                place = self.torch.index(layer)
                self.torch[place : place + 1] = shares
            for share, path in zip(shares, paths, strict=False):
                self._send(share, targets.get(path, (None, None))[0], pattern, path)

    def _targets(self) -> dict[Path, tuple[Layer, str | None]]:
        """What a rule may name: the path of a module, or of a leaf with its part of the layer."""
        found: dict[Path, tuple[Layer, str | None]] = {a.segments: (a, None) for a in self.flax}
        for layer in self.flax:
            for key, (path, _) in layer.parts.items():
                found[path] = found[without_collection(path)] = (layer, key)
        return found

    def _send(self, layer: Layer, target: Layer | None, pattern: str, path: Path) -> None:
        text = f"the rule {pattern!r} sends {layer.name} to {'/'.join(path)}"
        if target is None:
            self.ambiguous.append(f"{text}, which is neither a leaf nor a module of the Flax tree")
        elif target in self.partners.values():
            self.ambiguous.append(f"{text}, where an earlier rule sends another")
        else:
            self.partners[layer] = target

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
            if two is None:
                by_number = {layer.numbers: layer for layer in targets}
                two = [(a, by_number[a.numbers]) for a in group if a.numbers in by_number]
            if all(a.exact == b.exact for a, b in two) or all(self._fit(a, b) for a, b in two):
                self.partners.update(two)

    def _by_number(self) -> bool:
        """One round over the groups that fit each other; whether anything was paired.

        Where a group fits several, shapes and names decide.
        """
        mine, theirs = (
            _grouped(side, lambda a: (a.words, a.signature))
            for side in (self.open_torch, self.open_flax)
        )
        found: list[tuple[Any, Hashable, Hashable, list[Two]]] = []
        for key, group in mine.items():
            for other, targets in theirs.items():
                if fit := self._fit(group[0], targets[0]):
                    two = _in_order(group, targets, same_words=False)
                    if two is not None:
                        found.append(((fit, *_said(*two[0])), key, other, two))
        settled = [
            two
            for rank, key, other, two in found
            if all(rank > r for r, k, o, _ in found if (k == key) != (o == other))
        ]
        for two in settled:
            self.partners.update(two)
        return bool(settled)

    def _fit(self, layer: Layer, target: Layer) -> int:
        """2 if they fit, 1 if they do as a matrix stored (in, out), else 0."""
        key = (layer.signature, target.signature)  # a large model has few different ones
        if key not in self._known_fits:
            found = build(layer, target)
            conv1d = any(pair.kind == "conv1d.weight" for pair in found.pairs)
            self._known_fits[key] = found.fits * (1 if conv1d else 2)
        return self._known_fits[key]

    # --- what is left ---------------------------------------------------------------------------

    def _list_the_rest(self) -> None:
        """Says of every group that fits several where it could go, and the rules for it."""
        theirs = _grouped(self.open_flax, lambda layer: (layer.words, layer.signature))
        for group in _grouped(self.open_torch, lambda a: (a.words, a.signature)).values():
            fitting = [targets for targets in theirs.values() if self._fit(group[0], targets[0])]
            self.undecided.update(*fitting, group if fitting else ())
            rules = [rule for t in fitting if len(t) == len(group) and (rule := _rule(group, t))]
            if len(rules) == len(fitting):
                could_be = {rules[0][0]: [path for _, path in rules]} if rules else {}
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


def not_followed(rules: Sequence[tuple[str, str]], built: Mapping[Layer, Built]) -> list[str]:
    """A line for each tensor that a rule sends to another leaf than its layer brought it to."""
    lines: list[str] = []
    pairs = [(layer, pair) for layer, found in built.items() for pair in found.pairs]
    names = clean_names([pair.torch_name for _, pair in pairs])
    for layer, pair in pairs:
        name, place = names[pair.torch_name], without_collection(pair.path)
        pattern, paths = _first_rule(rules, [name, layer.name])
        said = [without_collection(path) for path in paths]
        # One that names the module too speaks of the layer, whichever leaf it gives.
        if re.fullmatch(pattern, layer.name):
            said += [path[:-1] for path in said if len(path) == len(place)]
        if said and not any(place[: len(path)] == path for path in said):
            lines.append(
                f"the rule {pattern!r} does not send {name} to {'/'.join(place)}, where its layer "
                f"{layer.name or '(root)'} goes: let one rule name the whole layer"
            )
    return lines


def _first_rule(rules: Sequence[tuple[str, str]], names: Sequence[str]) -> tuple[str, list[Path]]:
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
            return pattern, [tuple(path.strip("/").split("/")) for path in paths]
    return "", []


def _alone(layer: Layer, key: str, target: Layer, leaf: str) -> Two:
    """A tensor and a leaf as layers of their own: a kernel if it may be turned, or an array."""
    ours, theirs = layer.shape(key), target.shape(leaf)
    named = "weight" in layer.parts[key][0].rpartition(".")[2] or leaf == "kernel"
    usual, swapped = orders(ours, theirs)
    turns = usual or (swapped and len(ours) > 2)
    kernel = leaf not in _AS_THEY_ARE and turns and (ours != theirs or named)
    segments = layer.segments if key in ("", "weight") else (*layer.segments, key)
    path = (*target.segments, leaf) if leaf else target.segments
    tensor, place = ("weight", "kernel") if kernel else ("", "")
    kind: Kind = "weight" if kernel else "array"
    return (
        Layer(segments, kind, {tensor: layer.parts[key]}),
        Layer(path, kind, {place: target.parts[leaf]}, "/"),
    )


def _without(layers: Sequence[Layer], taken: Mapping[Part, Layer]) -> list[Layer]:
    """The layers with those of their parts exchanged that stand alone now."""
    kept: list[Layer] = []
    for layer in layers:
        rest = {key: part for key, part in layer.parts.items() if (layer, key) not in taken}
        kept += [taken[layer, key] for key in layer.parts if key not in rest]
        if len(rest) == len(layer.parts):
            kept.append(layer)
        elif rest:
            kept.append(Layer(layer.segments, layer.kind, rest, layer.sep))
    return kept


def _grouped(layers: Iterable[Layer], key: Callable[[Layer], Any]) -> dict[Any, list[Layer]]:
    groups: dict[Any, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(key(layer), []).append(layer)
    return groups


def _said(layer: Layer, target: Layer) -> tuple[bool, int]:
    """What the names say for two layers: that both are embeddings, or none, and equal words."""
    embeds = bool(_EMBEDDING_WORDS & set(layer.words)) == ("embedding" in target.parts)
    return embeds, len(layer.plain & target.plain)


def _in_order(
    mine: Sequence[Layer], theirs: Sequence[Layer], *, same_words: bool
) -> list[Two] | None:
    """The layers side by side in the order of their numbers, if these are nested alike.

    Numbers need not be equal: ``0, 2, 4`` in a Sequential with activations between is ``Dense_0``,
    ``Dense_1``, ``Dense_2``. None if the two sides cannot be put in correspondence.
    """
    if len(mine) != len(theirs) or not mine:
        return None
    left, right = (sorted(side, key=lambda layer: layer.numbers) for side in (mine, theirs))
    ours, others = (_nesting([layer.numbers for layer in side]) for side in (left, right))
    flat = not same_words and (len(ours[0]) == 1 or len(others[0]) == 1)
    distinct = all(len(set(side)) == len(side) for side in (ours, others))
    return list(zip(left, right, strict=True)) if distinct and (ours == others or flat) else None


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
