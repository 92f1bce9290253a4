"""`pair`: pairs every torch tensor of a model with its Flax leaf, or lists what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._pairing.decide import Pairing, decide, known_forms, refuse_lost_statistics
from torch_bridge._pairing.evidence import Apply, Evidence, Example
from torch_bridge._pairing.leaves import flatten_tree
from torch_bridge._pairing.options import Flatten, Options, PairOptions, Rules
from torch_bridge._pairing.pairs import Pair, leaves_from_torch
from torch_bridge._pairing.search import OTHER_FORMULA


class HasStateDict(Protocol):
    """A torch module, of which only ``state_dict`` is used."""

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the tensors by name."""
        ...


Model: TypeAlias = Mapping[str, Any] | HasStateDict
Pairs: TypeAlias = Sequence[Pair]


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

    With `apply` and `example` the Flax model is run with likely pairs, those of equal names first,
    in at most 500 runs. A model that never gives torch's outputs is refused. The runs that are
    left, at least 64, check that similar pairs do not give them, too. The other arguments decide
    for what they name; you need them for questions that the example does not answer.

    Without an example, layers of equal names belong together (``layers.0.conv1.weight`` and
    ``layers_0/conv1/kernel``). Any other layer is paired if its shapes leave only one choice with
    which all layers have a partner. One error asks all other questions: which of several layers is
    which, how a weight is stored, and what is a flattened map. ``plain=True`` answers that nothing
    is unusual, and each other argument answers one kind of question.

    Rules come first. The prefixes of DDP, FSDP and ``torch.compile`` are ignored.

    Args:
      model: Torch state dict (or module): name -> tensor, array or any object with a ``shape``. A
        module also shows which of its matrices are of a Linear and which of a Conv1D.
      like: Linen parameters, linen variables, ``nnx.State`` or an nnx module. If it has no place
        for running statistics, those of `model` are left out.
      rules: Regular expression -> path, tried in order. The expression must match the whole name of
        a tensor or module. The path is that of a leaf or a module, with groups as in
        ``r"block_\1/kernel"``. If tensor and leaf belong to different kinds of layers
        (``norm.gamma`` and ``norm/scale``), the two still become one pair; a matrix is transposed
        if its shape requires it. A Linear that packs several layers goes to several modules, in the
        order of its rows: ``{r"h\.(\d+)\.c_attn": r"1*(h_\1/query|h_\1/key|h_\1/value)"}``. With
        ``12*(...)`` the rows alternate: each of 12 heads, or groups of heads, has rows of every
        part, as in GPT-NeoX, BLOOM and Falcon. ``dense[0]|dense[2]|dense[1]`` names torch's parts
        in one packed Flax layer; a part that occurs several times in a row has as many blocks.
      flatten: Regular expression of the module name of a Linear (or of a recurrent layer with its
        suffix, as in ``lstm.l0``) -> the channels-first shape ``(C, H, W)`` of the map that is
        flattened before the layer. Flax flattens ``(H, W, C)``, so the layer's inputs must be
        reordered. Name all such layers, or pass ``{}`` if there is none. A layer with the shape
        None reads no map. With an example, layers that you do not name are tried. If other values
        stand beside the map, list all in order: ``[(3, 32, 32), 10]``. A norm of the same width
        directly before the layer is reordered, too. Name norms at other places.
      unflatten: The same for the outputs of a Linear that are reshaped to ``(C, H, W)``, as before
        the convolutions of a decoder, with the norm directly after the layer.
      conv_transpose: Regular expression of the module names of the ConvTranspose layers with as
        many inputs as outputs, whose shapes do not differ from a Conv's; ``""`` for none.
      conv1d: Regular expression of the module names of square matrices that are stored ``(in,
        out)``, as in transformers' ``Conv1D``; ``""`` for none. Other matrices show it by their
        shapes.
      turned: Regular expression of a bare parameter (of a Bilinear, or of a norm whose several axes
        are equal) -> the order of its axes in Flax, as for ``numpy.transpose``; ``{}`` if all have
        torch's order.
      plain: Answers open questions with the usual case: square weights are ``(out, in)`` and not of
        a ConvTranspose, bare parameters have torch's order of axes, and no map is flattened. Layers
        that differ only in their numbers are paired in the order of the numbers. Torch and Flax
        must number them in the same order; linen numbers nested calls from the outside. The bridge
        still asks about names that do not count in the same way (``convs1.0`` and ``Conv_0``), and
        about weights if other layers show the unusual form. The other arguments name exceptions.
      ignore: Regular expression of the names of tensors to leave out.
      apply: ``apply(params, *inputs) -> outputs``, the Flax model in evaluation mode; `params` is a
        tree of the structure of `like`. The inputs are arrays. Floating-point inputs with three or
        more axes are tried as they are, and with their second axis moved to the end.
      example: The result of `run_example`, or `Checkpoint.recorded_example`. They have a record of
        torch's calls, with which the search goes from layer to layer. Or only the inputs of the
        torch module (a tuple of arrays) and its outputs in evaluation mode.

    Returns:
      The pairs, in the natural order of the leaves. Every conversion takes them as `pairs`.

    Raises:
      CheckpointMismatch: Leaves are missing, unexpected, mis-shaped or ambiguous, or questions are
        open. Or a pattern of `rules`, `flatten`, `unflatten`, `turned` or `conv1d` matches nothing,
        or names a shape for a layer that has nothing to reorder. The error lists all. Or the Flax
        model does not give torch's outputs.
      ValueError: An argument has another form, or `apply` does not run on the example.

    Warns:
      UserWarning: A shape of `flatten` or `unflatten` seems to have the channels last. Or `plain`
        answers questions although no other layer supports the usual case; the warning lists them.
        Or the parts in a rule have no factor, and no example shows whether their rows alternate.

    Example:
      >>> import numpy as np
      >>> model = {"fc.weight": np.ones((3, 2)), "fc.bias": np.zeros(3)}
      >>> like = {"Dense_0": {"kernel": np.empty((2, 3)), "bias": np.empty(3)}}
      >>> [(p.torch_name, "/".join(p.path)) for p in pair(model, like)]
      [('fc.bias', 'Dense_0/bias'), ('fc.weight', 'Dense_0/kernel')]
    """
    options = Options(rules, flatten, unflatten, conv_transpose, conv1d, turned, plain, ignore)
    tensors = named(model)
    return decide(tensors, flatten_tree(like), options, known_forms(model), apply, example).pairs


def pairs_of(model: Model, like: Any, pairs: Pairs | None) -> tuple[Pair, ...]:
    """Returns the user's pairs of a tree or, without any, those that `pair` finds."""
    if pairs is None:
        return pair(model, like)
    return pairs_in_tree(like, pairs)


def find_or_check_pairs(
    model: Model,
    like: Any,
    pairs: Pairs | None,
    options: PairOptions,
    apply: Apply | None,
    example: Example | None,
) -> Pairing:
    """Returns the pairs of a whole model: the user's, or those that `pair` finds.

    With `apply` and `example` the user's pairs are checked by a run.

    Args:
      model: The torch model.
      like: The Flax tree, with a place for running statistics if the torch model has any.
      pairs: The pairs that the user passed, or None.
      options: The options of `pair`.
      apply: As for `pair`.
      example: As for `pair`.

    Raises:
      ValueError: Both `pairs` and `options` are passed, or one of `apply` and `example`.
      TypeError: An option does not exist.
      CheckpointMismatch: As for `pair` and `pairs_in_tree`. Or the pairs do not give torch's
        outputs. Or running statistics have no place: they would be lost in JAX, and old on the way
        back.
    """
    unknown = sorted(options.keys() - PairOptions.__optional_keys__)
    if unknown:
        names = ", ".join(sorted(PairOptions.__optional_keys__))
        raise TypeError(f"There is no argument {unknown[0]!r}; those of `pair` are {names}.")
    tensors = named(model)
    tree = flatten_tree(like)
    if pairs is None:
        read = Options(**options)
        refuse_lost_statistics(tensors, tree, read)
        return decide(tensors, tree, read, known_forms(model), apply, example)
    twice = list(filter(options.get, options))
    if twice:
        raise ValueError(
            f"`pairs` says already what belongs together. Leave out {', '.join(twice)}, or pass "
            "these arguments to torch_bridge.pair."
        )
    selected = pairs_in_tree(like, pairs)
    evidence = Evidence.of(apply, example, tree, tensors)
    if evidence is None:
        return Pairing(selected)
    difference = evidence.nearest(leaves_from_torch(selected, tensors))
    if not difference.is_rounding:
        raise CheckpointMismatch(
            f"The Flax model does not give torch's outputs with these `pairs`: they are "
            f"{difference}. Leave `pairs` out, so that runs find them. If they are right, the two "
            f"models compute different functions: {OTHER_FORMULA}",
            parameters=("pairs", "apply"),
        )
    return Pairing(selected, difference)


def pairs_in_tree(like: Any, pairs: Pairs) -> tuple[Pair, ...]:
    """Returns the pairs whose leaves are in a tree.

    Args:
      like: The tree that `pairs` were made for, or a part of it, such as the parameters of linen
        variables, or the trained parameters.
      pairs: The pairs that `pair` returned.

    Raises:
      CheckpointMismatch: The tree has other leaves, or leaves of other shapes; the error lists all.
    """
    shapes = flatten_tree(like).shapes
    selected = []
    paired = {}
    for one in pairs:
        if one.path in shapes:
            selected.append(one)
            paired[one.path] = one.shape
    missing = []
    wrong = []
    for path, shape in shapes.items():
        name = "/".join(path)
        if path not in paired:
            missing.append(name)
        elif paired[path] != shape:
            wrong.append(f"{name} {shape}, paired as {paired[path]}")
    if missing or wrong:
        raise CheckpointMismatch(
            "The tree is not the one that `pairs` were made for. Call torch_bridge.pair with it, "
            "or with a tree that contains it.",
            missing=missing,
            mis_shaped=wrong,
        )
    return tuple(selected)


def named(model: Model) -> Mapping[str, Any]:
    """Returns the state dict of a torch module, or `model` itself if it is a mapping.

    Raises:
      TypeError: `model` is neither a mapping nor a module.
    """
    if isinstance(model, Mapping):
        return model
    if not hasattr(model, "state_dict"):
        raise TypeError(
            f"A torch state dict or module is needed, got a {type(model).__name__}. If it is "
            "what torch_bridge.load returned, pass its attribute `model`."
        )
    return model.state_dict()
