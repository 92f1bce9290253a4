"""Finds the reading of two models with which Flax gives torch's outputs, by trying.

A reading says which torch layer is which Flax layer, in which form each weight is stored, and what
is a flattened map. It starts from a few likely ones, and goes on with single changes of the one
that came nearest, the likeliest change first, for a limited number of runs.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._pairing.evidence import Evidence
from torch_bridge._pairing.kinds import CONV, EMBEDDING, IN_OUT, Answer, build, kind_of
from torch_bridge._pairing.layers import Layer, words_of
from torch_bridge._pairing.maps import Flow, candidate_maps
from torch_bridge._pairing.match import Fits, Match, Partners, grouped
from torch_bridge._pairing.pairs import Pair, leaves_from_torch

TRIES = 500  # runs of the Flax model at most
_CHECKS = 64  # further runs that look whether the example tells the reading from its neighbours
_PATIENCE = 20  # changes of one reading after which it is put behind one twice as far off
_FAR = 0.3  # of the outputs' norm: above, a distance says nothing
_STEP = 0.2  # what one change more counts beside the distance
_SHOWN = 12  # layers in an error
_Node: TypeAlias = tuple[Layer, ...]


@dataclasses.dataclass(frozen=True)
class Reading:
    """One way to read two models.

    Attributes:
      partners: Torch layer -> Flax layer.
      answers: What else is assumed of a torch layer; nothing of those that are not in it.
    """

    partners: Partners
    answers: dict[Layer, Answer]

    def pairs(self) -> list[Pair]:
        """Makes the pairs of all layers."""
        pairs: list[Pair] = []
        for layer, target in self.partners.items():
            pairs += build(layer, target, self.answers.get(layer, Answer())).pairs
        return pairs

    def key(self) -> Any:
        """Returns what is equal for equal readings."""
        return frozenset(self.partners.items()), frozenset(self.answers.items())


class Proof(NamedTuple):
    """A reading that gives torch's outputs.

    Attributes:
      reading: It.
      difference: How far the outputs are apart, relative to the largest of torch's.
    """

    reading: Reading
    difference: float


@dataclasses.dataclass
class _State:
    """A reading that was tried, and its changes that have not been.

    Attributes:
      reading: It.
      depth: Changes since one of the first readings.
      distance: How far off its outputs are.
      tried: How many of its changes have been tried.
      changes: The others.
    """

    reading: Reading
    depth: int
    distance: float = 0.0
    tried: int = 0
    changes: Iterator[Reading] = dataclasses.field(default_factory=lambda: iter(()))

    @property
    def cost(self) -> float:
        """Decides which state is gone on with: far ones differ by their depth only."""
        return (min(self.distance / _FAR, 1.0) + _STEP * self.depth) * (1 + self.tried / _PATIENCE)


class Search:
    """The search for one reading among those that the layers of two models allow."""

    def __init__(
        self,
        match: Match,
        answers: Mapping[Layer, Answer],
        evidence: Evidence,
        tensors: Mapping[str, Any],
    ) -> None:
        """Prepares a search.

        Args:
          match: The layers, with what rules say.
          answers: What the user says, which is not searched for.
          evidence: The example.
          tensors: The torch tensors by name.
        """
        self._match = match
        self._said = dict(answers)
        self._evidence = evidence
        self._tensors = tensors
        self._leaves: dict[tuple[str, ...], tuple[list[Pair], np.ndarray]] = {}

    def prove(self) -> Proof:
        """Finds a reading that gives torch's outputs, and looks whether no other does.

        Raises:
          CheckpointMismatch: None of those tried does, or the example does not tell one from
            another.
        """
        nearest: list[tuple[float, Reading]] = []
        layouts = self._evidence.layouts
        for place, layout in enumerate(layouts):
            self._evidence.layout = layout
            found = self._search(TRIES * (place + 1) // len(layouts), nearest)
            if found:
                self._check(found.reading, found.difference)
                return found
        raise self._refusal(min(nearest, key=lambda one: one[0])[1])

    def _search(self, tries: int, nearest: list[tuple[float, Reading]]) -> Proof | None:
        """Looks for a reading with the inputs in one layout.

        Args:
          tries: Runs in all, earlier layouts included.
          nearest: The readings that were tried with their distances; filled here.
        """
        queue = [_State(reading, 0) for reading in self._first_readings()]
        waiting: list[tuple[float, int, _State]] = []
        seen: set[Any] = set()
        while queue or waiting:
            if queue:
                state = queue.pop(0)
            else:
                _, number, parent = heapq.heappop(waiting)
                reading = next(parent.changes, None)
                if reading is None:
                    continue
                parent.tried += 1
                heapq.heappush(waiting, (parent.cost, number, parent))
                state = _State(reading, parent.depth + 1)
            key = state.reading.key()
            if key in seen:
                continue
            seen.add(key)
            if self._evidence.runs >= tries:
                return None
            apart = self._apart(state.reading)
            if apart.largest <= self._evidence.tolerance:
                return Proof(state.reading, apart.largest)
            nearest.append((apart.mean, state.reading))
            state.distance = apart.mean
            state.changes = iter(Changes(state.reading, self._match, self._said, self._evidence))
            heapq.heappush(waiting, (state.cost, len(seen), state))
        return None

    def _apart(self, reading: Reading) -> Any:
        return self._evidence.apart(self._leaves_of(reading))

    def _leaves_of(self, reading: Reading) -> dict[tuple[str, ...], np.ndarray]:
        """Makes the leaves of a reading; those of the last one that are the same are kept."""
        by_path: dict[tuple[str, ...], list[Pair]] = {}
        for pair in reading.pairs():
            by_path.setdefault(pair.path, []).append(pair)
        leaves: dict[tuple[str, ...], np.ndarray] = {}
        for path, pairs in by_path.items():
            kept = self._leaves.get(path)
            if kept is None or kept[0] != pairs:
                kept = pairs, leaves_from_torch(pairs, self._tensors)[path]
                self._leaves[path] = kept
            leaves[path] = kept[1]
        return leaves

    def _first_readings(self) -> list[Reading]:
        """Lists likely readings: by names or without, in the order of use or of names."""
        by_rule = {layer: self._match.partners[layer] for layer in self._match.by_rule}
        by_name = self._match.partners
        flax = self._match.flax
        order = self._evidence.order
        used = sorted(flax, key=lambda target: min(order[p] for p, _ in target.parts.values()))
        readings: list[Reading] = []
        torch_orders = (self._match.torch, _in_turn(self._match.torch))
        choices = itertools.product((by_name, by_rule), (used, flax), torch_orders, (True, False))
        for decided, targets, layers, near in choices:
            partners = walk(self._match, decided, targets, layers=layers, near=near)
            if len(partners) == len(self._match.flax):
                readings.append(Reading(partners, self._upward(partners)))
        return readings

    def _upward(self, partners: Partners) -> dict[Layer, Answer]:
        """Assumes a ConvTranspose where the Flax model uses a kernel as one does."""
        answers = dict(self._said)
        for layer, target in partners.items():
            paths = {path for path, _ in target.parts.values()}
            forms = kind_of(layer, target).forms(layer, target)
            if paths & self._evidence.upward and IN_OUT in forms and layer not in answers:
                answers[layer] = Answer(form=IN_OUT)
        return answers

    # --- does the example tell? -----------------------------------------------------------------

    def _check(self, reading: Reading, difference: float) -> None:
        """Runs neighbours of a reading: what gives the same outputs is not told by the example.

        Raises:
          CheckpointMismatch: With every layer that could as well be another.
        """
        leaves = self._leaves_of(reading)
        changes = Changes(reading, self._match, self._said, self._evidence)
        doubtful: list[str] = []
        for text, other in itertools.islice(changes.alternatives(), _CHECKS):
            others = self._leaves_of(other)
            if all(np.array_equal(leaves[path], others[path]) for path in leaves):
                continue  # equal values, wherever they go
            apart = self._evidence.apart(others)
            if apart.largest <= max(self._evidence.tolerance, difference):
                doubtful.append(text)
        if doubtful:
            raise CheckpointMismatch(
                "The Flax model gives torch's outputs, but it would with some layers exchanged, "
                "too, so that the example does not tell which is which. Take other inputs, or say "
                "it with these arguments.",
                ambiguous=doubtful,
                parameters=("rules", "conv1d", "conv_transpose", "flatten"),
            )

    def _refusal(self, reading: Reading) -> CheckpointMismatch:
        """Says how far the nearest reading is off, and what could have been otherwise."""
        apart = self._apart(reading)
        changes = Changes(reading, self._match, self._said, self._evidence)
        doubtful = [text for text, _ in itertools.islice(changes.alternatives(), _SHOWN)]
        hint = (
            "All layers have their places, so that the two models seem to compute something else: "
            "look at the eps of norms, the sort of an activation (GELU with tanh or without), "
            "padding, evaluation mode, and what `apply` does with the inputs."
        )
        if doubtful:
            hint = (
                "The layers in doubt are listed; say of them what you know (rules, flatten, "
                "conv1d, conv_transpose). If all are right, the models compute something else: "
                "the eps of norms, the sort of an activation, padding, or evaluation mode."
            )
        return CheckpointMismatch(
            f"The Flax model does not give torch's outputs: after {self._evidence.runs} tries the "
            f"nearest are {apart.largest:.1e} of the largest output off, where "
            f"{self._evidence.tolerance:.0e} is rounding. {hint}",
            ambiguous=doubtful,
            parameters=("apply", "rules", "flatten", "conv1d", "conv_transpose"),
        )


def walk(
    match: Match,
    decided: Mapping[Layer, Layer],
    targets: Sequence[Layer],
    *,
    layers: Sequence[Layer] | None = None,
    near: bool = False,
) -> Partners:
    """Pairs the layers of torch in an order with those of Flax that fit.

    Args:
      match: The layers.
      decided: What is paired already.
      targets: The Flax layers in an order.
      layers: The torch layers in an order; None for that of the state dict.
      near: Whether a layer takes the next that fits behind the partner of the one before it, going
        round; else it takes the first.
    """
    partners = dict(decided)
    taken = {target: layer for layer, target in partners.items()}
    places = {target: place for place, target in enumerate(targets)}
    options = _fitting(match.torch, targets, match.fits)
    start = 0
    for layer in layers or match.torch:
        if layer not in partners:
            fitting = options[layer.signature]
            fitting = sorted(fitting, key=lambda t: (places[t] - start) % len(targets))
            if not _take(layer, fitting, options, partners, taken, decided, set()):
                continue
        if near:
            start = places[partners[layer]] + 1
    return partners


def _in_turn(layers: Sequence[Layer]) -> list[Layer]:
    """Orders layers as if series that stand one behind the other were called in turn.

    So lists of filters and of gates become the first filter, the first gate, the second filter.
    """
    runs: list[list[list[Layer]]] = []
    for segments, inside in itertools.groupby(layers, key=_numbered):
        member = list(inside)
        words = words_of(segments)[0]
        if runs and words_of(_numbered(runs[-1][-1][0]))[0] == words:
            runs[-1].append(member)
        else:
            runs.append([member])
    ordered: list[Layer] = []
    for _, alike in itertools.groupby(runs, key=len):
        for turn in zip(*alike, strict=True):
            ordered += itertools.chain.from_iterable(turn)
    return ordered


def _numbered(layer: Layer) -> tuple[str, ...]:
    """Returns the innermost module with a number for a name that a layer lies in, or its own."""
    for length in range(len(layer.segments), 0, -1):
        if layer.segments[length - 1].isdigit():
            return layer.segments[:length]
    return layer.segments


def _fitting(torch: Iterable[Layer], flax: Sequence[Layer], fits: Fits) -> dict[Any, list[Layer]]:
    """Finds by signature which Flax layers fit; those that fit in an unusual form come last."""
    options: dict[Any, list[Layer]] = {}
    for layer in torch:
        if layer.signature in options:
            continue
        strengths = {target: fits(layer, target) for target in flax}
        usual = [target for target in flax if strengths[target] > 1]
        unusual = [target for target in flax if strengths[target] == 1]
        options[layer.signature] = usual + unusual
    return options


def _take(
    layer: Layer,
    fitting: Sequence[Layer],
    options: Mapping[Any, Sequence[Layer]],
    partners: Partners,
    taken: dict[Layer, Layer],
    decided: Mapping[Layer, Layer],
    visited: set[Layer],
) -> bool:
    """Gives a layer a free partner, or one whose layer can take another (Kuhn's matching)."""
    strong = [target for target in fitting if target not in taken]
    for target in strong:
        partners[layer] = target
        taken[target] = layer
        return True
    for target in fitting:
        holder = taken[target]
        if target in visited or holder in decided:
            continue
        visited.add(target)
        if _take(holder, options[holder.signature], options, partners, taken, decided, visited):
            partners[layer] = target
            taken[target] = layer
            return True
    return False


class Changes:
    """The single changes of a reading, the likeliest first."""

    def __init__(
        self,
        reading: Reading,
        match: Match,
        said: Mapping[Layer, Answer],
        evidence: Evidence,
    ) -> None:
        self._reading = reading
        self._match = match
        self._said = said
        self._evidence = evidence
        self._layers = [layer for layer in match.torch if layer in reading.partners]

    def __iter__(self) -> Iterator[Reading]:
        """Lists the changed readings."""
        for changes in (self._forms(), self._maps(), self._exchanges()):
            for _, reading in changes:
                yield reading
        yield from self._maps_of_norms()
        for likely, alone in ((True, True), (False, False), (False, True)):
            for _, reading in self._forms(likely=likely, alone=alone):
                yield reading

    def alternatives(self) -> Iterator[tuple[str, Reading]]:
        """Lists for each thing that names do not tell one other reading, and says which."""
        for group, reading in self._forms():
            yield f"{_shown(group)}: how its weight is stored", reading
        asked: set[Any] = set()
        for group, reading in self._maps():
            if group[0].words not in asked:
                asked.add(group[0].words)
                answer = self._reading.answers.get(group[0], Answer())
                if answer.flatten or answer.unflatten:
                    yield f"{_shown(group)}: what is flattened", reading
        for alike in grouped(self._layers, lambda layer: layer.signature).values():
            for one, other in itertools.pairwise(alike):
                if {one, other} <= self._match.by_name | self._match.by_rule:
                    continue
                swapped = self._exchanged([(one,)], [(other,)])
                if swapped:
                    partners = self._reading.partners
                    text = f"{one.label} is {partners[one].label}, and {other.label} is "
                    yield f"{text}{partners[other].label}, or the other way round", swapped

    # --- forms ----------------------------------------------------------------------------------

    def _forms(
        self, *, likely: bool = True, alone: bool = False
    ) -> Iterator[tuple[list[Layer], Reading]]:
        """Changes the form of a weight, in all layers of one name together.

        Args:
          likely: Whether to change what is likely to be stored in another form; else the kernels
            of convolutions that the Flax model does not use as a ConvTranspose with a stride.
          alone: Whether to change it in each of several layers of one name alone.
        """
        forms: dict[Layer, tuple[str, ...]] = {}
        for layer in self._layers:
            target = self._reading.partners[layer]
            paths = {path for path, _ in target.parts.values()}
            is_conv = kind_of(layer, target) is CONV and not paths & self._evidence.upward
            if is_conv == likely:
                continue
            several = kind_of(layer, target).forms(layer, target)
            if len(several) > 1 and not self._said.get(layer, Answer()).form:
                forms[layer] = several
        groups = list(grouped(forms, lambda layer: (layer.words, forms[layer])).values())
        groups.sort(key=lambda group: len(forms[group[0]]))
        if alone:
            several_layers = [group for group in groups if len(group) > 1]
            groups = [[layer] for layer in itertools.chain.from_iterable(several_layers)]
        for group in groups:
            now = self._reading.answers.get(group[0], Answer()).form or forms[group[0]][0]
            for form in forms[group[0]]:
                if form != now:
                    yield group, self._with(group, form=form)

    # --- maps -----------------------------------------------------------------------------------

    def _maps(self) -> Iterator[tuple[list[Layer], Reading]]:
        """Changes what is flattened, in all layers of one name together; the whole before parts."""
        flow = Flow(self._match.torch, self._reading.partners, self._reading.answers)
        beside = _beside(flow, self._reading.partners, self._evidence)
        givers = flow.givers()
        for layer in self._layers:
            if kind_of(layer, self._reading.partners[layer]) is EMBEDDING:
                givers.append(layer)
        for others in ((), beside):
            for option, layers in (("flatten", flow.readers()), ("unflatten", givers)):
                channels = _channels(flow, self._evidence, option)
                alike = grouped(layers, lambda layer: (layer.words, flow.sizes[layer]))
                for group in sorted(alike.values(), key=lambda g: _explained(flow, option, g[0])):
                    yield from self._maps_of(option, group, flow, channels, others)

    def _maps_of(
        self,
        option: str,
        group: list[Layer],
        flow: Flow,
        channels: Sequence[int],
        others: Sequence[int],
    ) -> Iterator[tuple[list[Layer], Reading]]:
        if any(getattr(self._said.get(layer, Answer()), option) for layer in group):
            return
        sizes = flow.sizes[group[0]]
        values = sizes.reads if option == "flatten" else sizes.gives
        now = getattr(self._reading.answers.get(group[0], Answer()), option)
        for maps in [*candidate_maps(values, channels, others), ()]:
            if maps == now:
                continue
            reading = self._with(group, **{option: maps})
            followed = flow.with_norms(self._without_norms(reading.answers))
            yield group, dataclasses.replace(reading, answers=followed)

    def _without_norms(self, answers: Mapping[Layer, Answer]) -> dict[Layer, Answer]:
        """Drops the answers of norms, which follow their neighbours, but for what was said."""
        kept: dict[Layer, Answer] = {}
        for layer, answer in answers.items():
            if layer in self._said or not layer.is_vector:
                kept[layer] = answer
        return kept

    def _maps_of_norms(self) -> Iterator[Reading]:
        """Changes the map of a norm alone."""
        flow = Flow(self._match.torch, self._reading.partners, self._reading.answers)
        channels = _channels(flow, self._evidence, "flatten")
        for layer in self._layers:
            if layer.is_vector and layer not in self._said:
                for maps in [*candidate_maps(flow.sizes[layer].gives, channels), ()]:
                    yield self._with([layer], flatten=maps)

    # --- which of several layers ----------------------------------------------------------------

    def _exchanges(self) -> Iterator[tuple[list[Layer], Reading]]:
        """Exchanges layers, or modules, that are alike; what names decide comes last."""
        named = self._match.by_name | self._match.by_rule
        late: list[tuple[list[Layer], Reading]] = []
        back = {target: layer for layer, target in self._reading.partners.items()}
        targets = [target for target in self._match.flax if target in back]
        for side in (self._layers, targets):
            for ones, others in _exchangeable(side):
                if side is targets:
                    ones = _mapped(ones, back)
                    others = _mapped(others, back)
                reading = self._exchanged(ones, others)
                if reading is None:
                    continue
                group = [layer for node in (*ones, *others) for layer in node]
                if named.issuperset(group):
                    late.append((group, reading))
                else:
                    yield group, reading
        yield from late

    def _exchanged(self, ones: Sequence[_Node], others: Sequence[_Node]) -> Reading | None:
        """Exchanges the partners of the layers of some modules with those of others."""
        partners = dict(self._reading.partners)
        for one, other in zip(ones, others, strict=True):
            for layer, second in zip(one, other, strict=True):
                if layer in self._match.by_rule or second in self._match.by_rule:
                    return None
                partners[layer], partners[second] = partners[second], partners[layer]
        for node in (*ones, *others):
            for layer in node:
                if not self._match.fits(layer, partners[layer]):
                    return None
        return dataclasses.replace(self._reading, partners=partners)

    def _with(self, group: Iterable[Layer], **fields: Any) -> Reading:
        answers = dict(self._reading.answers)
        for layer in group:
            answers[layer] = answers.get(layer, Answer())._replace(**fields)
        return dataclasses.replace(self._reading, answers=answers)


def _mapped(nodes: Sequence[_Node], back: Mapping[Layer, Layer]) -> list[_Node]:
    """Finds the torch layers of modules of Flax."""
    mapped: list[_Node] = []
    for node in nodes:
        mapped.append(tuple(back[target] for target in node))
    return mapped


def _exchangeable(layers: Sequence[Layer]) -> Iterator[tuple[list[_Node], list[_Node]]]:
    """Lists modules that can be exchanged, as two lists of the layers in them.

    First all modules of one name with all of another (every query with every key), then the modules
    of one name in the opposite order, then two neighbours, then any two.
    """
    nodes: dict[tuple[str, ...], list[Layer]] = {}
    for layer in layers:
        for length in range(1, len(layer.segments) + 1):
            nodes.setdefault(layer.segments[:length], []).append(layer)
    families: dict[Any, list[_Node]] = {}
    for segments, inside in nodes.items():
        words = Layer(segments, "bare", {}).words
        kind = (words, tuple(layer.signature for layer in inside))
        families.setdefault(kind, []).append(tuple(inside))
    alike: dict[Any, list[list[_Node]]] = {}
    for (_, signatures), members in families.items():
        alike.setdefault((signatures, len(members)), []).append(members)
    for series in alike.values():
        yield from itertools.combinations(series, 2)
    several = [members for members in families.values() if len(members) > 1]
    for members in several:
        half = len(members) // 2
        yield members[:half], members[: len(members) - half - 1 : -1]
    for members in several:
        for one, other in itertools.pairwise(members):
            yield [one], [other]
    for members in several:
        for one, other in itertools.combinations(members, 2):
            yield [one], [other]


def _channels(flow: Flow, evidence: Evidence, option: str) -> list[int]:
    """Lists numbers of channels that a map may have: those of convolutions, and of pictures."""
    channels: list[int] = []
    for conv in flow.convs:
        sizes = flow.sizes[conv]
        channels.append(sizes.gives if option == "flatten" else max(sizes.reads, 1))
    channels.reverse()
    if option == "unflatten":
        channels.reverse()
    arrays = evidence.inputs if option == "flatten" else evidence.outputs
    for array in arrays:
        if array.ndim > 2 and array.dtype.kind == "f":
            channels += [array.shape[1], array.shape[-1]]
    for conv in flow.convs:
        channels += [flow.sizes[conv].reads, flow.sizes[conv].gives]
    return list(dict.fromkeys(channels))


def _beside(flow: Flow, partners: Partners, evidence: Evidence) -> list[int]:
    """Lists numbers of values that may stand beside a flattened map: labels and other inputs."""
    widths: list[int] = []
    for layer in flow.layers:
        if kind_of(layer, partners[layer]) is EMBEDDING:
            widths.append(layer.shape("weight")[-1])
    for array in evidence.inputs:
        if array.ndim == 2:
            widths.append(array.shape[-1])
    return list(dict.fromkeys(widths))


def _explained(flow: Flow, option: str, layer: Layer) -> bool:
    """Tells whether a matrix gives what a layer reads (or reads what it gives): it sorts last."""
    sizes = flow.sizes[layer]
    for other in flow.layers:
        if other.is_vector or flow.sizes[other].space or other is layer:
            continue
        if option == "flatten" and flow.sizes[other].gives == sizes.reads:
            return True
        if option == "unflatten" and flow.sizes[other].reads == sizes.gives:
            return True
    return False


def _shown(group: Sequence[Layer]) -> str:
    names = [layer.label for layer in group]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
