"""`pair`: every torch tensor of a model with its Flax leaf, or one error that says why not."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import STATISTICS, clean_names, equal_matrices, shape_of, tied
from torch_bridge._base.terminal import printable
from torch_bridge._pairing.evidence import Apply, Evidence, Example
from torch_bridge._pairing.kinds import IN_OUT, OUT_IN, Answer, build
from torch_bridge._pairing.layers import NO_LAYER, Layer, Shape, layers_of
from torch_bridge._pairing.leaves import Tree
from torch_bridge._pairing.leaves import flatten as flatten_tree
from torch_bridge._pairing.match import Match, Partners
from torch_bridge._pairing.options import Flatten, Options, PairOptions, Rules, idle_patterns
from torch_bridge._pairing.pairs import Pair
from torch_bridge._pairing.questions import Questions
from torch_bridge._pairing.search import Search, walk

# How torch's own classes, and transformers', store their weights.
_FORMS = {"Linear": OUT_IN, "_ConvNd": OUT_IN, "Conv1D": IN_OUT}
_PACKED = (3, 2, 4)  # parts of a packed Linear: query, key and value; key and value; gates
_REPARAMETRIZED = {
    "weight_norm keeps a length and a direction in the place of a weight. Put flax.linen."
    "WeightNorm around the layer, or call torch.nn.utils.remove_weight_norm (or parametrize."
    "remove_parametrizations) before the file is saved.": r".*(weight_g|weight\.original0)\b.*",
    "spectral_norm divides a weight by its largest singular value. Call torch.nn.utils."
    "remove_spectral_norm (or parametrize.remove_parametrizations) before the file is saved.": (
        r".*(weight_orig|weight\.original|weight\.0\._[uv]|weight_[uv])\b.*"
    ),
    "An LSTM with proj_size has no counterpart among Flax's cells. Write the cell by hand and name "
    "its leaves with rules.": r".*weight_hr_.*",
}


class HasStateDict(Protocol):
    """A torch module, as far as it matters here."""

    def state_dict(self) -> Mapping[str, Any]:
        """Returns tensors by name."""
        ...


Model: TypeAlias = Mapping[str, Any] | HasStateDict
Pairs: TypeAlias = Sequence[Pair]


class Paired(NamedTuple):
    """What a conversion goes by.

    Attributes:
      pairs: Every tensor with its leaf.
      difference: How far the Flax outputs were from torch's, relative to the largest; None where
        nothing was run.
    """

    pairs: tuple[Pair, ...]
    difference: float | None = None


def pair(
    model: Model,
    like: Any,
    rules: Rules = (),
    *,
    flatten: Flatten | None = None,
    unflatten: Flatten | None = None,
    conv_transpose: str | None = None,
    conv1d: str | None = None,
    turned: Mapping[str, Sequence[int]] | None = None,
    plain: bool = False,
    ignore: str | None = None,
    apply: Apply | None = None,
    example: Example | None = None,
) -> tuple[Pair, ...]:
    r"""Finds for every torch tensor its Flax leaf.

    With an example the Flax model is run: what names and shapes leave open is tried, the likeliest
    first, in at most 500 runs, and what does not give torch's outputs is refused. Then no other
    argument is needed but for what the example cannot tell.

    Without one, layers of equal names belong together (``layers.0.conv1.weight`` and
    ``layers_0/conv1/kernel``). Else a layer goes to the only one that it fits, and never to another
    block than its siblings. Whatever is left open is asked in one error: which of several layers,
    how a weight is stored, what is a flattened map. ``plain=True`` says that nothing is unusual,
    and each other argument answers one question.

    A rule comes before all this, and prefixes of DDP, FSDP and ``torch.compile`` are skipped.

    Args:
      model: Torch state dict (or module): name -> tensor, array or anything with a ``shape``. A
        module also says which of its matrices are Linear or Conv1D.
      like: Linen parameters, linen variables, ``nnx.State`` or an nnx module. Where it has no place
        for running statistics, those of `model` are left out.
      rules: Regular expression -> path, tried in order. The expression has to match a whole tensor
        or module name; the path is a leaf or a module, with groups as in ``r"block_\1/kernel"``.
        Where it names a tensor and a leaf of different kinds of layers (``norm.gamma`` and
        ``norm/scale``), these two become one pair, a matrix turned if its shape says so. A Linear
        that packs several goes to several modules, in the order of its rows:
        ``{r"h\.(\d+)\.c_attn": r"h_\1/query|h_\1/key|h_\1/value"}``.
      flatten: Regular expression of the module name of a Linear (or of a recurrent layer with its
        suffix, as in ``lstm.l0``) -> the channels-first shape ``(C, H, W)`` of what is flattened
        before it. All such layers are named, ``{}`` if there is none; None leaves one out. Flax
        flattens ``(H, W, C)``, so that the inputs of such a layer have to move. Where other
        values stand beside the map, all in order: ``[(3, 32, 32), 10]``.
        A norm of as many values directly before the layer follows it; one elsewhere can be named.
      unflatten: The same for the outputs of a Linear that are seen as ``(C, H, W)``, as before the
        convolutions of a decoder, with the norm directly behind it.
      conv_transpose: Regular expression of the module names of those ConvTranspose layers that have
        as many inputs as outputs, which no shape tells from a Conv; ``""`` for none.
      conv1d: Regular expression of the module names of square matrices that are stored ``(in,
        out)``, as by transformers' ``Conv1D``; ``""`` for none. All that are not square show it.
      turned: Regular expression of a bare parameter (or of a Bilinear) -> the order of its axes in
        Flax, as for ``numpy.transpose``; ``{}`` where all are as they are.
      plain: Whether everything left open is as usual: alike layers go in the order of their
        numbers, square weights are ``(out, in)`` and no ConvTranspose's, bare parameters are as
        they are, and no map is flattened. Other arguments say what is not.
      ignore: Regular expression of tensor names that shall be left out.
      apply: ``apply(params, *inputs) -> outputs``, the Flax model in evaluation mode; `params` is a
        tree of the structure of `like`. Inputs are arrays, of which those with floating-point
        values and three or more axes are tried as they are and with their second axis last.
      example: Inputs of the torch module (a tuple of arrays) and its outputs in evaluation mode.

    Returns:
      The pairs, in the natural order of the leaves. Every conversion takes them as `pairs`.

    Raises:
      CheckpointMismatch: With every missing, unexpected, mis-shaped and ambiguous leaf, every
        question, and those patterns of `rules`, `flatten`, `unflatten`, `turned` and `conv1d` that
        match nothing, or name a shape where it moves nothing. Or the Flax outputs are not torch's.
      ValueError: An argument has another form, or `apply` does not run on the example.

    Warns:
      UserWarning: A shape of `flatten` or `unflatten` seems to have the channels last.

    Example:
      >>> import numpy as np
      >>> model = {"fc.weight": np.ones((3, 2)), "fc.bias": np.zeros(3)}
      >>> like = {"Dense_0": {"kernel": np.empty((2, 3)), "bias": np.empty(3)}}
      >>> [(p.torch_name, "/".join(p.path), p.kind) for p in pair(model, like)]
      [('fc.bias', 'Dense_0/bias', 'vector'), ('fc.weight', 'Dense_0/kernel', 'linear.weight')]
    """
    options = Options(rules, flatten, unflatten, conv_transpose, conv1d, turned, plain, ignore)
    evidence = _evidence(apply, example, model, like)
    return _pair(model, flatten_tree(like), options, evidence=evidence).pairs


def pairs_for(
    model: Model, like: Any, pairs: Pairs | None, options: PairOptions | None = None
) -> tuple[Pair, ...]:
    """Returns the pairs of a conversion: those that it was given, or what `pair` finds.

    Args:
      model: The torch model.
      like: The Flax tree.
      pairs: What `pair` gave, or None.
      options: Of `pair`, for a whole model, which must not leave running statistics behind; None
        for a part of one.

    Raises:
      ValueError: Both `pairs` and `options` are given.
      TypeError: There is no such option.
      CheckpointMismatch: As for `pair` and `pairs_of`, or running statistics would be lost on the
        way to JAX, and stale on the way back.
    """
    return paired_for(model, like, pairs, options).pairs


def paired_for(
    model: Model,
    like: Any,
    pairs: Pairs | None,
    options: PairOptions | None = None,
    apply: Apply | None = None,
    example: Example | None = None,
) -> Paired:
    """Does what `pairs_for` does, with an example if there is one.

    Args:
      model: The torch model.
      like: The Flax tree.
      pairs: What `pair` gave, or None.
      options: As for `pairs_for`.
      apply: As for `pair`; without an example it is not used.
      example: As for `pair`.
    """
    known = PairOptions.__optional_keys__
    for name in options or {}:
        if name not in known:
            names = ", ".join(sorted(known))
            raise TypeError(f"There is no argument {name!r}; those of `pair` are {names}.")
    evidence = _evidence(apply, example, model, like)
    if pairs is None:
        whole = options is not None
        return _pair(
            model, flatten_tree(like), Options(**options or {}), whole=whole, evidence=evidence
        )
    given = [name for name, value in (options or {}).items() if value]
    if given:
        raise ValueError(
            f"`pairs` says already what belongs together. Leave out {', '.join(given)}, or give "
            "these to torch_bridge.pair."
        )
    return Paired(pairs_of(like, pairs))


def pairs_of(like: Any, pairs: Pairs) -> tuple[Pair, ...]:
    """Selects the pairs whose leaves are in a tree.

    Args:
      like: The tree that `pairs` were made for, or a part of it: the parameters of linen variables,
        or the trainable ones.
      pairs: What `pair` gave.

    Raises:
      CheckpointMismatch: The tree has other leaves, or some of another shape; all are listed.
    """
    shapes = flatten_tree(like).shapes
    selected = tuple(one for one in pairs if one.path in shapes)
    paired = {one.path: one.shape for one in selected}
    missing = ["/".join(path) for path in shapes if path not in paired]
    wrong: list[str] = []
    for path, shape in paired.items():
        if shapes[path] != shape:
            wrong.append(f"{'/'.join(path)} {shapes[path]}, paired as {shape}")
    if missing or wrong:
        raise CheckpointMismatch(
            "The tree is not the one that `pairs` were made for. Call torch_bridge.pair with it, "
            "or with a tree that contains it.",
            missing=missing,
            mis_shaped=wrong,
        )
    return selected


def _evidence(
    apply: Apply | None, example: Example | None, model: Model, like: Any
) -> Callable[[], Evidence] | None:
    """Returns what prepares the runs of an example, or None if there is none.

    Raises:
      ValueError: One of the two arguments is missing, which would leave the other without use.
    """
    if apply is None and example is None:
        return None
    if apply is None or example is None:
        missing = "apply" if apply is None else "example"
        raise ValueError(
            f"`apply` and `example` belong together, and `{missing}` is missing. An example is in "
            "files of save_checkpoint(..., example=inputs); of other files it is the inputs of the "
            "torch module, a tuple, and its outputs: example=(inputs, outputs)."
        )
    tensors = list(named(model).values())
    return lambda: Evidence(apply, example, flatten_tree(like), tensors)


def _pair(
    model: Model,
    tree: Tree,
    options: Options,
    *,
    whole: bool = False,
    evidence: Callable[[], Evidence] | None = None,
) -> Paired:
    """Pairs two models, with what is tied in torch as one leaf or several, or as values say."""
    tensors = named(model)
    names = clean_names(list(tensors))
    kept: dict[str, Any] = {}
    for name, value in tensors.items():
        if not re.fullmatch(options.ignore or "(?!)", names[name]):
            kept[name] = value
    _refuse_lost_statistics(kept, tree, whole)
    known = _known_forms(model)
    runs = evidence() if evidence else None
    errors: list[CheckpointMismatch] = []
    # The likeliest first: what is tied is one leaf, or several, or the file shows no ties.
    for ties, untied in ((tied, False), (tied, True), (equal_matrices, False)):
        first = ties(kept)
        if not first and errors:
            continue  # the same tensors as before
        shapes = {n: shape_of(value) for n, value in kept.items() if untied or n not in first}
        indices = _tables_of_indices(kept)
        layers = Layers(shapes, tree, options, {*names.values()}, known, indices)
        try:
            paired = layers.proved(runs, kept) if runs else layers.decided()
        except CheckpointMismatch as error:
            errors.append(error)
            continue
        return paired._replace(pairs=_with_aliases(paired.pairs, kept, first))
    for error in errors:
        if not (error.missing or error.unexpected or error.mis_shaped):
            raise error  # of ties that leave every tensor and leaf a place
    raise errors[0]


def _tables_of_indices(tensors: Mapping[str, Any]) -> set[str]:
    """Finds the integer tensors beside floating ones: they are leaves only by name or rule."""
    integers: set[str] = set()
    for name, value in tensors.items():
        dtype = str(getattr(value, "dtype", "float32")).removeprefix("torch.")
        if re.match(r"u?int|bool", dtype):
            integers.add(name)
    return integers if len(integers) < len(tensors) else set()


def _refuse_lost_statistics(tensors: Mapping[str, Any], tree: Tree, whole: bool) -> None:
    lost = [name for name in tensors if whole and name.endswith(STATISTICS)]
    if lost and not tree.has_statistics:
        raise CheckpointMismatch(
            "The Flax tree has no place for running statistics. Pass linen variables with "
            "'batch_stats' (or an nnx.State with BatchStat), or ignore=r'.*running_(mean|var)'.",
            unexpected=[f"{name} {shape_of(tensors[name])}" for name in lost],
            parameters=("ignore",),
        )


def _with_aliases(
    pairs: Sequence[Pair], tensors: Mapping[str, Any], first: Mapping[str, str]
) -> tuple[Pair, ...]:
    """Gives every pair the other names of its tensor."""
    alike: dict[str, list[str]] = {}
    for name in tensors:
        alike.setdefault(first.get(name, name), []).append(name)
    complete: list[Pair] = []
    for one in pairs:
        group = alike[first.get(one.torch_name, one.torch_name)]
        others = tuple(name for name in group if name != one.torch_name)
        complete.append(dataclasses.replace(one, aliases=others))
    return tuple(complete)


class Layers:
    """The layers of two models, to be paired by what is said, or by an example."""

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        tree: Tree,
        options: Options,
        tensors: Collection[str],
        known: Mapping[str, str],
        indices: Collection[str],
    ) -> None:
        """Makes the layers.

        Args:
          shapes: Tensor name -> shape, of what shall be paired.
          tree: The Flax tree.
          options: What the user says.
          tensors: The names of all tensors, ignored and tied ones included.
          known: Module name -> how its weight is stored, of torch's own classes.
          indices: Integer tensors, which are left out unless a name or a rule says where they go.
        """
        self._shapes = shapes
        self._tree = tree
        self._options = options
        self._tensors = tensors
        self._known = known
        self._indices = indices

    def decided(self) -> Paired:
        """Pairs by rules, names and shapes, and by what the user says.

        Raises:
          CheckpointMismatch: Something does not fit, or is not told.
        """
        match = self._matched_by_name()
        match.match_shapes()
        candidates, back = match.candidates()
        lonely = [layer for layer in match.open_torch if not candidates[layer]]
        rest = [target for target in match.open_flax if not back[target]]
        if take_apart(match, lonely, rest):
            match.match_names()
            match.match_shapes()
        questions = Questions(match, self._options, self._known)
        self._refuse_idle(match, questions.movable())
        self._refuse_problems(match, questions)
        return Paired(self._ordered(match.partners, questions.answers))

    def proved(self, evidence: Evidence, tensors: Mapping[str, Any]) -> Paired:
        """Pairs by rules and by an example, which decides what names and shapes leave open.

        Raises:
          CheckpointMismatch: Something does not fit, or does not give torch's outputs.
        """
        options = dataclasses.replace(self._options, plain=True)
        match = self._matched_by_name()
        match.drop_misfits()
        self._split(match)
        match.match_names()
        match.drop_misfits()
        questions = Questions(match, options, self._known)
        self._refuse_idle(match, {})
        said = _said_answers(questions, self._options, match)
        complete = walk(match, {}, match.flax)
        if len(complete) < len(match.flax):
            plainly = self._matched_by_name()
            plainly.match_shapes()
            self._refuse_problems(plainly, Questions(plainly, options, self._known))
            self._refuse_problems(match, questions)
        proof = Search(match, said, evidence, tensors).prove()
        _warn_of_unused(match, proof.reading.partners)
        pairs = self._ordered(proof.reading.partners, proof.reading.answers)
        return Paired(pairs, proof.difference)

    def _matched_by_name(self) -> Match:
        match = Match(*layers_of(self._shapes, self._tree), self._options.rules)
        match.match_names()
        self._leave_out_indices(match)
        return match

    def _leave_out_indices(self, match: Match) -> None:
        for layer in match.open_torch:
            if all(name in self._indices for name, _ in layer.parts.values()):
                match.torch.remove(layer)

    def _split(self, match: Match) -> None:
        """Takes layers apart that have no partner as a whole: packed ones, then into parts."""
        for divide in (_shares, take_apart):
            partners = walk(match, match.partners, match.flax)
            lonely = [layer for layer in match.torch if layer not in partners]
            taken = set(partners.values())
            rest = [target for target in match.flax if target not in taken]
            divide(match, lonely, rest)

    def _ordered(self, partners: Partners, answers: Mapping[Layer, Answer]) -> tuple[Pair, ...]:
        places = {path: place for place, path in enumerate(self._tree.shapes)}
        pairs: list[Pair] = []
        for layer, target in partners.items():
            pairs += build(layer, target, answers.get(layer, Answer())).pairs
        return tuple(sorted(pairs, key=lambda one: places[one.path]))

    def _refuse_idle(self, match: Match, movable: Mapping[str, Collection[str]]) -> None:
        layers = [layer.name for layer in match.torch]
        idle = idle_patterns(self._options, self._tensors, layers, movable)
        if idle:
            raise CheckpointMismatch(
                "Some patterns match no layer of the torch model, and they have to match a whole "
                "name; or there is no order of (C, H, W) in it: `flatten` is for what reads a "
                "flattened map, `unflatten` for a Linear whose outputs become one. Correct them or "
                "leave them out.",
                unexpected=idle,
                parameters=sorted({line.partition(":")[0] for line in idle}),
            )

    def _refuse_problems(self, match: Match, questions: Questions) -> None:
        """Collects everything that does not fit or is not told, and raises it at once."""
        built = []
        for layer, target in match.partners.items():
            built.append(build(layer, target, questions.answers.get(layer, Answer())))
        candidates, back = match.candidates()
        built += [build(layer, NO_LAYER) for layer in match.open_torch if not candidates[layer]]
        built += [build(NO_LAYER, target) for target in match.open_flax if not back[target]]
        problems: dict[str, list[str]] = {"missing": [], "unexpected": [], "mis_shaped": []}
        for part in built:
            problems["missing"] += part.missing
            problems["unexpected"] += part.unexpected
            problems["mis_shaped"] += part.mis_shaped
        problems["mis_shaped"] += questions.wrong
        crossing = match.contradictions()
        problems["ambiguous"] = match.problems + crossing + questions.asked
        problems = {kind: lines for kind, lines in problems.items() if lines}
        if not problems:
            return
        only_asked = problems == {"ambiguous": questions.asked}
        message = (
            "The torch model and the Flax tree do not correspond. Say what belongs together with "
            "`rules` (regular expression -> path) and what to leave out with `ignore`."
        )
        if only_asked and questions.plain:
            message = (
                "If nothing is unusual in this model (square weights are (out, in) and no "
                "ConvTranspose's, alike layers go by their numbers, no map is flattened), "
                "plain=True answers all of this. Else answer with these arguments; or give apply= "
                "and example=, which find it out."
            )
        elif only_asked:
            message = (
                "Neither names nor shapes tell how some layers correspond. Give apply= and "
                "example=, which find it out, or answer with these arguments."
            )
        for sentence, pattern in _REPARAMETRIZED.items():
            if any(re.match(pattern, line) for line in problems.get("unexpected", [])):
                message = f"{sentence} {message}"
        options = _options_in(problems)
        parameters = ("rules", *options, "ignore", "apply")
        raise CheckpointMismatch(message, parameters=parameters, **problems)


def _warn_of_unused(match: Match, partners: Partners) -> None:
    """Says which tensors the Flax model has no place for, though it gives torch's outputs."""
    unused: list[str] = []
    for layer in match.torch:
        if layer not in partners:
            unused += [layer.line(part) for part in layer.parts]
    if unused:
        shown = printable("; ".join(unused))
        warnings.warn(
            f"Left out, since the Flax model has no place for it and gives torch's outputs on the "
            f"example without it: {shown}. ignore= says the same without a warning.",
            stacklevel=2,
        )


def take_apart(match: Match, torch: Sequence[Layer], flax: Sequence[Layer]) -> bool:
    """Takes layers apart into their parts, in the lists of a match; tells whether any was."""
    done = False
    for layers, side in ((torch, match.torch), (flax, match.flax)):
        for layer in layers:
            if len(layer.parts) > 1 and layer.sort in ("weight", "kernel", "norm", "bare"):
                place = side.index(layer)
                side[place : place + 1] = layer.singles()
                done = True
    return done


def _shares(match: Match, torch: Sequence[Layer], flax: Sequence[Layer]) -> bool:
    """Takes packed Linears apart that have no partner as a whole, but their parts have."""
    done = False
    for layer in torch:
        weight = layer.shape("weight")
        for count in _PACKED:
            if len(weight) != 2 or weight[0] % count:
                continue
            shares = layer.shares(count)
            if sum(1 for target in flax if match.fits(shares[0], target)) >= count:
                place = match.torch.index(layer)
                match.torch[place : place + 1] = shares
                done = True
                break
    return done


def _said_answers(questions: Questions, options: Options, match: Match) -> dict[Layer, Answer]:
    """Selects the answers that the user gave, or torch's classes; the others are searched for."""
    said: dict[Layer, Answer] = {}
    for layer, answer in questions.answers.items():
        for option in ("conv1d", "conv_transpose", "turned"):
            pattern = getattr(options, option)
            names = [pattern] if isinstance(pattern, str) else list(pattern or ())
            if any(re.fullmatch(name, layer.name) for name in names):
                said[layer] = answer
        if answer.flatten or answer.unflatten:
            said[layer] = answer
    return said


def _known_forms(model: Model) -> dict[str, str]:
    """Reads from the classes of a torch module how their weights are stored; {} of a state dict."""
    forms: dict[str, str] = {}
    modules = getattr(model, "named_modules", None)
    if modules is None:
        return forms
    for name, module in modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _FORMS:
                forms[name] = _FORMS[kind.__name__]
            if kind.__name__ == "_ConvTransposeNd":
                forms.pop(name, None)
                break
    return forms


def _options_in(problems: Mapping[str, Sequence[str]]) -> list[str]:
    """Finds the options that the lines of an error speak of."""
    text = "\n".join(line for lines in problems.values() for line in lines)
    known = sorted(PairOptions.__optional_keys__ - {"ignore", "rules"})
    return [name for name in known if re.search(rf"\b{name}=", text)]


def named(model: Model) -> Mapping[str, Any]:
    """Returns the state dict of a torch module, or the mapping itself.

    Raises:
      TypeError: It is neither.
    """
    if isinstance(model, Mapping):
        return model
    if not hasattr(model, "state_dict"):
        raise TypeError(
            f"A torch state dict or module is needed, got a {type(model).__name__}. Of what "
            "torch_bridge.load returns it is the attribute `model`."
        )
    return model.state_dict()
