"""Which torch layer is which Flax layer: by rule, by name, by structure, or not at all.

Evidence, in this order. A user's rule. The very name of a tensor and a leaf. The same name
(``layers.0.conv1`` and ``layers_0/conv1``, whatever the case). The same structure: layers of equal
shapes whose names differ only in their numbers form a group, and a group goes to the one group of
the other side that has as many layers of such shapes, numbered alike. Where several groups qualify,
modules of the same name and modules already matched decide; where these do not decide either, the
match is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from torch_bridge._base.names import clean_names
from torch_bridge._pairing.doubts import form_of, storage, storage_of_its_kind
from torch_bridge._pairing.exact import Cut, of_equal_names, without
from torch_bridge._pairing.layers import Built, Hints, build
from torch_bridge._pairing.maps import Maps
from torch_bridge._pairing.options import SHAPES, Options
from torch_bridge._pairing.units import FlaxUnit, TorchUnit

TRANSPOSED_WORDS = frozenset({"convtranspose", "transpose", "transposed", "deconv", "tconv"})
_UPWARD_WORDS = frozenset({"up", "ups", "upconv", "upsample", "upsampling"})
_EMBEDDING_WORDS = frozenset(
    {"emb", "embed", "embedder", "embedding", "embeddings", "wte", "wpe", "tok", "token", "tokens"}
)
Index = tuple[int, ...]
Couple = tuple[TorchUnit, FlaxUnit]


@dataclasses.dataclass
class Matcher:
    """Matches the units of two models; `couples` holds what is settled so far."""

    torch: list[TorchUnit]
    flax: list[FlaxUnit]
    options: Options
    couples: dict[TorchUnit, FlaxUnit] = dataclasses.field(default_factory=dict)
    ambiguous: list[str] = dataclasses.field(default_factory=list)
    undecided: set[TorchUnit | FlaxUnit] = dataclasses.field(default_factory=set)
    assumed: list[str] = dataclasses.field(default_factory=list)  # square, taken for a Linear
    known_fits: dict[Hashable, bool] = dataclasses.field(default_factory=dict)
    moved: dict[tuple[str, str], bool] = dataclasses.field(default_factory=dict)
    straight_too: bool = False  # matrices that fit as (in, out) only are no mistake

    def run(self) -> list[Built]:
        """Matches, builds the pairings of every couple and fills `ambiguous`."""
        self._couple_alone(self._said_exactly())
        self._by_rule()
        self._couple_alone(of_equal_names(self.open_torch, self.open_flax))
        self._by_name(lambda unit: unit.stem.exact, forced=True)
        # What fits a Linear is one: (in, out) explains only what is left after that.
        for self.straight_too in (False, True):
            self.known_fits.clear()
            self._by_name(lambda unit: unit.stem.words, forced=False)
            while self._by_structure():
                pass
        self._explain_leftovers()
        return [self._build(*couple) for couple in self.couples.items()]

    @property
    def open_torch(self) -> list[TorchUnit]:
        """The torch units without a partner."""
        return [unit for unit in self.torch if unit not in self.couples]

    @property
    def open_flax(self) -> list[FlaxUnit]:
        """The Flax units without a partner."""
        taken = set(self.couples.values())
        return [unit for unit in self.flax if unit not in taken]

    def _said_exactly(self) -> list[Cut]:
        """Tensors and leaves that a rule names, and that their layers keep apart."""
        owners = {
            path: (unit, key) for unit in self.flax for key, (path, _) in unit.entries.items()
        }
        cuts: dict[tuple[str, ...], Cut] = {}
        for unit in self.torch if self.options.rules else ():
            for key, (name, _) in unit.entries.items():
                path = self._path_said(unit, self._cleaned[name])
                target = owners.get(path) or owners.get(("params", *path))
                if path and target and (cut := Cut(unit, key, *target)).is_needed:
                    cuts.setdefault(target[0].entries[target[1]][0], cut)
        return list(cuts.values())

    def _path_said(self, unit: TorchUnit, name: str) -> tuple[str, ...]:
        """Where the first rule sends this tensor by its own name; () if it goes with its layer."""
        for pattern, template in self.options.rules:
            if found := re.fullmatch(pattern, name):
                path = _expanded(found, pattern, template)
                return path[0] if len(path) == 1 else ()
            if re.fullmatch(pattern, unit.name):
                return ()
        return ()

    def _couple_alone(self, cuts: Sequence[Cut]) -> None:
        """Take tensors and leaves out of their layers and couple them."""
        mine: dict[TorchUnit, list[TorchUnit]] = {}
        theirs: dict[FlaxUnit, list[FlaxUnit]] = {}
        for cut in cuts:
            unit, target = cut.units()
            mine.setdefault(cut.torch, []).append(unit)
            theirs.setdefault(cut.flax, []).append(target)
            self.couples[unit] = target
        self.torch = without(self.torch, _grouped_keys((c.torch, c.tensor) for c in cuts), mine)
        self.flax = without(self.flax, _grouped_keys((c.flax, c.leaf) for c in cuts), theirs)

    def _by_rule(self) -> None:
        leaves = {path: unit for unit in self.flax for path, _ in unit.entries.values()}
        modules = {unit.path: unit for unit in self.flax}
        for unit in tuple(self.torch):
            names = (*(self._cleaned[name] for name in unit.names()), unit.name)
            for pattern, template in self.options.rules:
                found = next((m for name in names if (m := re.fullmatch(pattern, name))), None)
                if found is None:
                    continue
                paths = _expanded(found, pattern, template)
                parts = [unit]
                if len(paths) > 1 and unit in self.torch:
                    count = len(paths)
                    parts = [dataclasses.replace(unit, part=(k, count)) for k in range(count)]
                    self.torch[self.torch.index(unit) : self.torch.index(unit) + 1] = parts
                for part, path in zip(parts, paths, strict=False):
                    self._follow_rule(part, pattern, path, leaves, modules)

    def _follow_rule(
        self,
        unit: TorchUnit,
        pattern: str,
        path: tuple[str, ...],
        leaves: Mapping[tuple[str, ...], FlaxUnit],
        modules: Mapping[tuple[str, ...], FlaxUnit],
    ) -> None:
        target = leaves.get(path) or leaves.get(("params", *path)) or modules.get(path)
        if target is None:
            self.ambiguous.append(
                f"the rule {pattern!r} sends {unit.name} to {'/'.join(path)}, "
                "which is neither a leaf nor a module of the Flax tree"
            )
        elif self.couples.get(unit, target) is not target:
            pass  # an earlier rule has decided
        elif target in self.couples.values() and unit not in self.couples:
            self.ambiguous.append(
                f"the rule {pattern!r} sends {unit.name} to {target.name}, where an earlier rule "
                "sends another layer"
            )
        else:
            self.couples[unit] = target

    def _by_name(self, words: Callable[[TorchUnit | FlaxUnit], Hashable], *, forced: bool) -> None:
        """Couples units of the same family whose names agree but for the numbers.

        Args:
          words: The part of the name that has to agree.
          forced: Couple them even if their shapes differ, so that the difference is reported.
        """
        theirs = _grouped(self.open_flax, lambda unit: (words(unit), unit.family))
        for key, group in _grouped(self.open_torch, lambda u: (words(u), u.family)).items():
            couples = _aligned(group, theirs.get(key, []), same_words=True)
            if couples is None and forced:
                by_number = {unit.stem.numbers: unit for unit in theirs.get(key, [])}
                numbers = [unit.stem.numbers for unit in group]
                couples = [
                    (u, by_number[n]) for u, n in zip(group, numbers, strict=True) if n in by_number
                ]
            if couples and (forced or all(self._fits(*couple) for couple in couples)):
                self.couples.update(couples)

    def _by_structure(self) -> bool:
        """One round over the groups; whether anything was coupled."""
        options = self._candidates()
        settled = [
            couples
            for (mine, theirs), couples in options.items()
            if self._best(options, 0, mine) == self._best(options, 1, theirs) == (mine, theirs)
        ]
        for couples in settled:
            self.couples.update(couples)
        return bool(settled)

    def _candidates(self) -> dict[tuple[Hashable, Hashable], list[Couple]]:
        mine = _grouped(self.open_torch, lambda unit: (unit.stem.words, _signature(unit)))
        theirs = _grouped(self.open_flax, lambda unit: (unit.stem.words, _signature(unit)))
        found = {}
        for key, group in mine.items():
            for other, targets in theirs.items():
                if group[0].family == targets[0].family and self._fits(group[0], targets[0]):
                    couples = _aligned(group, targets, same_words=False)
                    if couples is not None:
                        found[key, other] = couples
        return found

    def _best(
        self,
        options: Mapping[tuple[Hashable, Hashable], list[Couple]],
        side: int,
        group: Hashable,
    ) -> tuple[Hashable, Hashable] | None:
        """The one candidate of a group that has more evidence than all others."""
        ranked = sorted(
            (
                (self._evidence(couples), key)
                for key, couples in options.items()
                if key[side] == group
            ),
            key=lambda item: item[0],
        )
        if len(ranked) > 1 and ranked[-1][0] == ranked[-2][0]:
            return None
        return ranked[-1][1]

    def _evidence(self, couples: Sequence[Couple]) -> tuple[int, int, int]:
        mine, theirs = couples[0]
        embedding = "embedding" in theirs.entries
        embeds = bool(_EMBEDDING_WORDS.intersection(mine.stem.words)) == embedding
        shared = len(mine.stem.segments & theirs.stem.segments)
        known = {_parent(unit.name.split(".")): set() for unit in self.couples}
        for unit, target in self.couples.items():
            known[_parent(unit.name.split("."))].add(_parent(target.path))
        neighbours = sum(
            _parent(target.path) in known.get(_parent(unit.name.split(".")), ())
            for unit, target in couples
        )
        return (int(embeds), shared, neighbours)

    def _explain_leftovers(self) -> None:
        """Says of every leftover that fits somewhere where it could go."""
        targets = self.open_flax
        for unit in self.open_torch:
            fitting = [t for t in targets if t.family == unit.family and self._fits(unit, t)]
            if fitting:
                self.undecided |= {unit, *fitting}
                names = [target.name or "(root)" for target in fitting]
                shown = " or ".join(names[:4]) + (" or ..." if len(names) > 4 else "")
                shapes = ", ".join(str(shape) for _, shape in unit.entries.values())
                self.ambiguous.append(f"{unit.name or '(root)'} {shapes} could be {shown}")

    @functools.cached_property
    def _cleaned(self) -> dict[str, str]:
        return clean_names([name for unit in self.torch for name in unit.names()])

    @functools.cached_property
    def _clearly_transposed(self) -> frozenset[tuple[str, ...]]:
        """Torch stems that hold a kernel which only a ConvTranspose can have."""
        return frozenset(
            unit.stem.words
            for unit, target in self.couples.items()
            if form_of(unit, target) == "transposed"
        )

    def _build(self, unit: TorchUnit, target: FlaxUnit) -> Built:
        hints = Hints(
            flattened=self._map_of("flatten", unit),
            unflattened=self._map_of("unflatten", unit),
            transposed=self._is_transposed(unit, target),
            straight=self._is_straight(unit, target),
        )
        built = build(unit, target, hints)
        for option, field in zip(SHAPES, ("flattened", "unflattened"), strict=True):
            said = self._said(option, unit)
            if said is None or said[1] is None:
                continue
            without = build(unit, target, dataclasses.replace(hints, **{field: None}))
            moved = (without.pairings, without.mis_shaped) != (built.pairings, built.mis_shaped)
            self.moved[option, said[0]] = moved or self.moved.get((option, said[0]), False)
            if moved:
                built.mis_shaped = [f"{line}, with {option}={said[1]}" for line in built.mis_shaped]
        return built

    @property
    def idle(self) -> list[str]:
        """Patterns of shapes that matched layers and moved nothing in any of them."""
        return [
            f"{option}: {pattern}" for (option, pattern), moved in self.moved.items() if not moved
        ]

    def _said(self, option: str, unit: TorchUnit) -> tuple[str, tuple[int, ...] | None] | None:
        """The last pattern of `flatten` or `unflatten` that names this layer, and its shape."""
        said = [item for item in getattr(self.options, option) if re.fullmatch(item[0], unit.name)]
        return said[-1] if said else None

    def _map_of(self, option: str, unit: TorchUnit) -> tuple[int, ...] | None:
        said = self._said(option, unit)
        if said is not None:
            return said[1]
        of, layer = self._maps.follows.get(unit, ("", unit))
        if of == option:
            return self._map_of(option, layer)
        found = getattr(self._maps, option).get(unit)
        if found is None:
            return None
        if found.question and found.question not in self.ambiguous:
            self.ambiguous.append(found.question)
        return found.shape

    def _is_transposed(self, unit: TorchUnit, target: FlaxUnit) -> bool:
        words = set(unit.stem.words) | set(target.stem.words)
        transposed = bool(words & TRANSPOSED_WORDS)
        if self.options.conv_transpose is not None:
            transposed = re.fullmatch(self.options.conv_transpose, unit.name) is not None
        elif form_of(unit, target) == "both" and not transposed:
            transposed = unit.stem.words in self._clearly_transposed
            if not transposed and words & _UPWARD_WORDS:
                self.ambiguous.append(
                    f"{unit.name} has as many inputs as outputs, so it may be a Conv or a "
                    "ConvTranspose: say which with conv_transpose=<regular expression>"
                )
        return transposed

    def _is_straight(self, unit: TorchUnit, target: FlaxUnit) -> bool:
        form = storage(unit, target)
        if form != "both":
            return form == "straight"
        if self.options.conv1d is not None:
            return re.fullmatch(self.options.conv1d, unit.name) is not None
        form = storage_of_its_kind(unit, self.couples)
        if form == "both":
            self.ambiguous.append(
                f"{unit.name} is square, and others in the model are stored (in, out): say whether "
                "it is, too, with conv1d=<regular expression>"
            )
        elif form == "none" and max(unit.entries["weight"][1]) > 1:
            self.assumed.append(unit.name)
        return form == "straight"

    @functools.cached_property
    def _maps(self) -> Maps:
        return Maps.of(self.torch, self.couples)

    def _fits(self, unit: TorchUnit, target: FlaxUnit) -> bool:
        key = (_signature(unit), _signature(target))  # a large model has few different ones
        if key not in self.known_fits:
            hints = [Hints(), Hints(straight=True)] if self.straight_too else [Hints()]
            self.known_fits[key] = any(build(unit, target, hint).fits for hint in hints)
        return self.known_fits[key]


def _expanded(found: re.Match[str], pattern: str, template: str) -> list[tuple[str, ...]]:
    """The paths of a rule for the name that it matched."""
    try:
        expanded = found.expand(template).split("|")
    except (re.error, IndexError) as error:
        raise ValueError(
            f"`rules`: the path {template!r} of {pattern!r} cannot be used ({error})."
        ) from error
    return [tuple(path.strip("/").split("/")) for path in expanded]


def _grouped_keys(pairs: Iterable[tuple[Any, str]]) -> dict[Any, set[str]]:
    taken: dict[Any, set[str]] = {}
    for unit, key in pairs:
        taken.setdefault(unit, set()).add(key)
    return taken


def _parent(path: Sequence[str]) -> tuple[str, ...]:
    return tuple(path[:-1])


def _signature(unit: TorchUnit | FlaxUnit) -> Hashable:
    return (unit.family, frozenset((key, shape) for key, (_, shape) in unit.entries.items()))


def _grouped(units: Iterable, key: Callable[..., Hashable]) -> dict[Hashable, list]:
    groups: dict[Hashable, list] = {}
    for unit in units:
        groups.setdefault(key(unit), []).append(unit)
    return groups


def _aligned(
    mine: Sequence[TorchUnit], theirs: Sequence[FlaxUnit], *, same_words: bool
) -> list[Couple] | None:
    """The units side by side in the order of their numbers, if these are nested alike.

    Numbers need not be equal: ``0, 2, 4`` in a Sequential with activations between is ``Dense_0``,
    ``Dense_1``, ``Dense_2``. None if the two sides cannot be put in correspondence.
    """
    if len(mine) != len(theirs) or not mine:
        return None
    left = sorted(mine, key=lambda unit: unit.stem.numbers)
    right = sorted(theirs, key=lambda unit: unit.stem.numbers)
    ours, others = (_nesting([u.stem.numbers for u in side]) for side in (left, right))
    flat = not same_words and (len(ours[0]) == 1 or len(others[0]) == 1)
    distinct = all(len(set(side)) == len(side) for side in (ours, others))
    if distinct and (ours == others or flat):
        return list(zip(left, right, strict=True))
    return None


def _nesting(numbers: Sequence[Index]) -> list[Index]:
    """Sorted numbers as ranks within their parent, without the positions that never vary."""
    width = len(numbers[0])
    varying = [k for k in range(width) if len({index[k] for index in numbers}) > 1]
    kept = [tuple(index[k] for k in varying) for index in numbers]
    ranked = []
    for index in kept:
        rank = []
        for depth in range(len(index)):
            siblings = sorted({o[depth] for o in kept if o[:depth] == index[:depth]})
            rank.append(siblings.index(index[depth]))
        ranked.append(tuple(rank))
    return ranked
