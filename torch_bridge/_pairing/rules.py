"""Follows the user's rules, which name the Flax layer or leaf of a torch layer or tensor."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch_bridge._base.tensors import clean_names
from torch_bridge._pairing.kinds import join
from torch_bridge._pairing.layers import Layer, replace_layers
from torch_bridge._pairing.leaves import without_collection
from torch_bridge._pairing.pairs import Packing, Shape


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
        groups = None
        parts = text
        in_groups = re.fullmatch(r"(\d+)\*\((.*)\)", text)
        if in_groups:
            groups = max(int(in_groups[1]), 1)
            parts = in_groups[2]
        paths = []
        places = []
        sizes = []
        for part, blocks in itertools.groupby(parts.split("|")):
            numbered = re.fullmatch(r"(.*)\[(\d+)\]", part)
            if numbered:
                part = numbered[1]
                places.append(int(numbered[2]))
            words = tuple(part.strip("/").split("/"))
            paths.append("/".join(without_collection(words)))
            sizes.append(len(list(blocks)))
        problem = ""
        if places and (len(set(paths)) > 1 or sorted(places) != list(range(len(paths)))):
            problem = (
                "must name every part of one Flax layer once, as in 'dense[0]|dense[2]|dense[1]'"
            )
        elif not places and len(set(paths)) < len(paths):
            problem = (
                "names a Flax layer twice. Blocks of one part must follow each other, as in "
                "'8*(query|query|key|value)'"
            )
        if problem:
            raise ValueError(f"`rules`: {text!r} of {pattern!r} {problem}.")
        if places:
            paths = paths[:1]
        if max(sizes) == 1:
            sizes = []
        return cls(pattern, paths, groups, tuple(sizes), tuple(places))

    def packing(self, sizes: Shape) -> Packing | None:
        """Returns the order of the packed rows, for parts in the ratio of `sizes`.

        It is None if the parts follow each other in the same order in both frameworks.
        """
        places = self.places or tuple(range(len(sizes)))
        order = tuple(map(places.index, range(len(places))))
        packing = Packing(order, self.groups or 1, 1, sizes)
        if packing.torch_groups == 1 and packing.is_in_order:
            return None
        return packing


class Ruled:
    """The pairs of layers that the user's rules decide.

    Attributes:
      partners: Torch layer -> Flax layer.
      packings: The orders of packed rows that rules name.
      consecutive: The packed layers that a rule sends to several Flax layers without a word about
        the order of the rows, so that the parts are taken to follow each other.
      problems: A line of text for each rule that cannot be followed.
    """

    def __init__(
        self, torch: list[Layer], flax: list[Layer], rules: Sequence[tuple[str, str]]
    ) -> None:
        """Pairs the layers that rules name, or single tensors and leaves of two other layers.

        Args:
          torch: The torch layers. Layers that a rule divides are replaced by their parts.
          flax: The Flax layers, likewise.
          rules: Regular expressions and paths, the first that matches counts.
        """
        self.partners: dict[Layer, Layer] = {}
        self.packings: dict[Layer, Packing] = {}
        self.consecutive: list[Layer] = []
        self.problems: list[str] = []
        names = clean_names(list(itertools.chain.from_iterable(map(Layer.tensors, torch))))
        owners = {}  # path of a layer or leaf -> the layer
        leaves = {}
        for target in flax:
            owners.setdefault(target.name, target)
            for leaf, (path, _) in target.parts.items():
                owners["/".join(path)] = target
                leaves["/".join(path)] = leaf
        shares = {}
        for layer in torch.copy():
            sent = {}  # Flax layers -> the first rule that sends a part of `layer` to them
            for part, (name, _) in list(layer.parts.items()):
                rule = _first_rule(rules, names[name], layer.name)
                if rule is None:
                    continue
                targets = tuple(map(owners.get, rule.paths))
                leaf = leaves.get(rule.paths[0])
                target = targets[0]
                if (
                    target is None
                    or leaf is None
                    or len(targets) > 1
                    or _meet(layer, part, target, leaf, rule)
                ):
                    sent.setdefault(targets, rule)
                    continue
                one = layer.single(part)
                other = target.single(leaf)
                del layer.parts[part]
                del target.parts[leaf]
                join.cache_clear()  # its entries for these two layers are out of date
                replace_layers(torch, {layer: [one, layer]})
                replace_layers(flax, {target: [other, target]})
                self.partners[one] = other
                owners[rule.paths[0]] = other
                del leaves[rule.paths[0]]
            if sent:
                shares[layer] = self._send(layer, sent)
        replace_layers(torch, shares)

    def _send(self, layer: Layer, sent: Mapping[Any, Rule]) -> list[Layer]:
        """Follows the rule for one layer.

        If the rule names one Flax layer, pairs the two. If it names several, divides the rows of
        the torch layer into as many shares, and pairs each share.

        Returns:
          The shares, or the layer alone.
        """
        (targets, rule), *others = sent.items()
        text = f"the rule {rule.pattern!r} sends {layer} to"
        sizes = rule.sizes
        shares = [layer]
        if rule.places:  # one packed Flax layer
            sizes = sizes or (1,) * len(rule.places)
        else:
            sizes = sizes or _relative_rows(layer, targets)
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
            units = packing.torch_groups * sum(sizes)
            if rows[0] % units:
                self.problems.append(f"{text} {units} equal blocks of rows, and it has {rows[0]}")
            self.packings.update(dict.fromkeys(shares, packing))
        elif len(shares) > 1 and rule.groups is None and not layer.is_packed_by_torch():
            self.consecutive.append(layer)
        return shares


def _relative_rows(layer: Layer, targets: Sequence[Layer | None]) -> Shape:
    """Returns the ratio of the rows of a packed layer's parts: that of the kernels' widths.

    If the kernels do not have as many columns in all, the parts are equal, and do not fit.
    """
    rows, *inputs = layer.shape("weight") or (0,)
    widths = []
    for target in targets:
        widths.append(width_of(target, math.prod(inputs)) if target else 0)
    if not all(widths) or sum(widths) != rows:
        return (1,) * len(targets)
    unit = math.gcd(*widths)
    return tuple(width // unit for width in widths)


def width_of(target: Layer, inputs: int) -> int:
    """Returns the number of outputs of a kernel; 0 if it has another number of inputs."""
    kernel = target.shape("kernel")
    width, rest = divmod(math.prod(kernel), inputs)
    if rest or not kernel:
        return 0
    return width


def _meet(layer: Layer, part: str, target: Layer, leaf: str, rule: Rule) -> bool:
    """Returns whether a rule for a tensor and a leaf should pair their whole layers.

    That is so if joining the layers links the tensor with the leaf. It is also so if the rule's
    pattern matches the module's name, too, and joining the layers gives any link.
    """
    links = join(layer, target).links
    if (part, leaf) in links:
        return True
    return bool(links) and re.fullmatch(rule.pattern, layer.name) is not None


def _first_rule(rules: Sequence[tuple[str, str]], *names: str) -> Rule | None:
    """Returns the first rule whose pattern matches the name of a tensor or its module, or None."""
    for (pattern, template), name in itertools.product(rules, names):
        match = re.fullmatch(pattern, name)
        if match is None:
            continue
        try:
            return Rule.of(pattern, match.expand(template))
        except (re.error, IndexError) as error:
            raise ValueError(
                f"`rules`: the path {template!r} of {pattern!r} cannot be used ({error})."
            ) from error
    return None
