"""`pair`: every torch tensor of a model with its Flax leaf, or one error that says why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._pairing.decide import Paired, decide, known_forms, refuse_lost_statistics
from torch_bridge._pairing.evidence import Apply, Evidence, Example
from torch_bridge._pairing.leaves import flatten as flatten_tree
from torch_bridge._pairing.options import Flatten, Options, PairOptions, Rules
from torch_bridge._pairing.pairs import Pair


class HasStateDict(Protocol):
    """A torch module, as far as it matters here."""

    def state_dict(self) -> Mapping[str, Any]:
        """Returns tensors by name."""
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

    With an example the Flax model is run: what names and shapes leave open is tried, the likeliest
    first, in at most 500 runs, and what does not give torch's outputs is refused. Then no other
    argument is needed but for what the example cannot tell.

    Without one, layers of equal names belong together (``layers.0.conv1.weight`` and
    ``layers_0/conv1/kernel``). Else a layer goes to its place if there is one only that leaves the
    others theirs. Whatever is left open is asked in one error: which of several layers, how a
    weight is stored, what is a flattened map. ``plain=True`` says that nothing is unusual, and each
    other argument answers one question.

    A rule comes before all this, and prefixes of DDP, FSDP and ``torch.compile`` are skipped.

    Args:
      model: Torch state dict (or module): name -> tensor, array or anything with a ``shape``. A
        module also says which of its matrices are Linear or Conv1D.
      like: Linen parameters, linen variables, ``nnx.State`` or an nnx module. Where it has no place
        for running statistics, those of `model` are left out.
      rules: Regular expression -> path, tried in order. The expression has to match a whole tensor
        or module name; the path is a leaf or a module, with groups as in ``r"block_\1/kernel"``.
        If tensor and leaf belong to different kinds of layers (``norm.gamma`` and ``norm/scale``),
        the two still become one pair; a matrix is transposed if its shape says so. A Linear that
        packs several goes to several modules, in the order of its rows:
        ``{r"h\.(\d+)\.c_attn": r"h_\1/query|h_\1/key|h_\1/value"}``.
      flatten: Regular expression of the module name of a Linear (or of a recurrent layer with its
        suffix, as in ``lstm.l0``) -> the channels-first shape ``(C, H, W)`` of what is flattened
        before it. All such layers are named, ``{}`` if there is none; None leaves one out. With an
        example it settles the layers that it names, and others are tried. Flax flattens
        ``(H, W, C)``, so that the inputs of such a layer have to move. Where other values stand
        beside the map, all in order: ``[(3, 32, 32), 10]``.
        A norm of as many values directly before the layer follows it; one elsewhere can be named.
      unflatten: The same for the outputs of a Linear that are seen as ``(C, H, W)``, as before the
        convolutions of a decoder, with the norm directly behind it.
      conv_transpose: Regular expression of the module names of those ConvTranspose layers that have
        as many inputs as outputs, which no shape tells from a Conv; ``""`` for none.
      conv1d: Regular expression of the module names of square matrices that are stored ``(in,
        out)``, as by transformers' ``Conv1D``; ``""`` for none. All that are not square show it.
      turned: Regular expression of a bare parameter (or of a Bilinear) -> the order of its axes in
        Flax, as for ``numpy.transpose``; ``{}`` where all are as they are.
      plain: Whether everything left open is as usual: square weights are ``(out, in)`` and no
        ConvTranspose's, bare parameters are as they are, and no map is flattened. Alike layers go
        in the order of their numbers, which both sides have to count in the same order; linen
        counts nested calls from the outside. Other arguments say what is not.
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
      >>> [(p.torch_name, "/".join(p.path)) for p in pair(model, like)]
      [('fc.bias', 'Dense_0/bias'), ('fc.weight', 'Dense_0/kernel')]
    """
    options = Options(rules, flatten, unflatten, conv_transpose, conv1d, turned, plain, ignore)
    return _paired(model, like, options, apply, example, whole=False).pairs


def paired_for(
    model: Model,
    like: Any,
    pairs: Pairs | None,
    options: PairOptions | None = None,
    apply: Apply | None = None,
    example: Example | None = None,
) -> Paired:
    """Returns the pairs of a conversion: those that it was given, or what `pair` finds.

    Args:
      model: The torch model.
      like: The Flax tree.
      pairs: What `pair` gave, or None.
      options: Of `pair`, for a whole model, which must not leave running statistics behind; None
        for a part of one.
      apply: As for `pair`.
      example: As for `pair`.

    Raises:
      ValueError: Both `pairs` and `options` are given.
      TypeError: There is no such option.
      CheckpointMismatch: As for `pair` and `pairs_of`, or running statistics would be lost on the
        way to JAX, and stale on the way back.
    """
    unknown = sorted((options or {}).keys() - PairOptions.__optional_keys__)
    if unknown:
        names = ", ".join(sorted(PairOptions.__optional_keys__))
        raise TypeError(f"There is no argument {unknown[0]!r}; those of `pair` are {names}.")
    if pairs is None:
        whole = options is not None
        return _paired(model, like, Options(**options or {}), apply, example, whole=whole)
    twice = [name for name, value in (options or {}).items() if value]
    if twice:
        raise ValueError(
            f"`pairs` says already what belongs together. Leave out {', '.join(twice)}, or give "
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
    return selected


def _paired(
    model: Model,
    like: Any,
    options: Options,
    apply: Apply | None,
    example: Example | None,
    *,
    whole: bool,
) -> Paired:
    """Pairs two models, with an example if there is one.

    Raises:
      ValueError: One of `apply` and `example` is missing, which leaves the other without use.
    """
    tensors = named(model)
    tree = flatten_tree(like)
    if whole:
        refuse_lost_statistics(tensors, tree, options)
    evidence = None
    if apply is not None and example is not None:
        evidence = Evidence(apply, example, tree, list(tensors.values()))
    elif apply is not None or example is not None:
        missing = "apply" if apply is None else "example"
        raise ValueError(
            f"`apply` and `example` belong together, and `{missing}` is missing. An example is in "
            "files of save_checkpoint(..., example=inputs); of other files it is the inputs of the "
            "torch module, a tuple, and its outputs: example=(inputs, outputs)."
        )
    return decide(tensors, tree, options, known_forms(model), evidence)


def named(model: Model) -> Mapping[str, Any]:
    """Returns the state dict of a torch module, or the mapping itself.

    Raises:
      TypeError: It is neither.
    """
    if isinstance(model, Mapping):
        return model
    if not hasattr(model, "state_dict"):
        raise TypeError(
            f"A torch state dict or module is needed, got a {type(model).__name__}. If it is "
            "what torch_bridge.load returned, pass its attribute `model`."
        )
    return model.state_dict()
