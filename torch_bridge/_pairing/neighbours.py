"""Runs the neighbours of a reading, which show what its outputs do not tell."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._pairing.evidence import TRIES, Difference
from torch_bridge._pairing.maps import Reading
from torch_bridge._pairing.match import grouped
from torch_bridge._pairing.pairs import Path
from torch_bridge._pairing.proposals import (
    Case,
    Change,
    changed,
    exchanged,
    flattened_maps,
    forms,
    packed_rows,
)

_LEAST_CHECKS = 64  # neighbours that are run even if the search has used up all runs
_SLIGHT = 1e-2  # relative to the largest output; another eps or activation differs by less
_SHOWN = 12  # the most layers in an error
OTHER_FORMULA = (
    "look at the eps and momentum of norms, the form of an activation (GELU with tanh or without), "
    "padding, a factor by which torch multiplies a weight (equalised learning rate, LoRA), "
    "evaluation mode, and what `apply` does with the inputs."
)

_REPARAMETRIZED = {
    "weight_norm stores a length and a direction instead of a weight. Put flax.linen."
    "WeightNorm around the layer, or call torch.nn.utils.remove_weight_norm (or parametrize."
    "remove_parametrizations) before you save the file.": r".*(weight_g|weight\.original0)\b.*",
    "spectral_norm divides a weight by its largest singular value. Call torch.nn.utils."
    "remove_spectral_norm (or parametrize.remove_parametrizations) before you save the file.": (
        r".*(weight_orig|weight\.original|weight\.0\._[uv]|weight_[uv])\b.*"
    ),
    "An LSTM with proj_size has no counterpart among Flax's cells. Write the cell by hand and name "
    "its leaves with rules.": r".*weight_hr_.*",
}


def refuse_doubtful(
    case: Case, proved: Reading, leaves_of: Callable[[Reading], Mapping[Path, np.ndarray]]
) -> None:
    """Runs the neighbours of a reading, and refuses it if one gives torch's outputs, too.

    The runs that the search has left are for these checks.

    Args:
      case: The two models and the example.
      proved: The reading, which gives torch's outputs.
      leaves_of: Makes the leaves of a reading.

    Raises:
      CheckpointMismatch: The example does not tell some layers apart; the error lists all that
        were run.
    """
    leaves = leaves_of(proved)
    doubtful = []
    checks = max(_LEAST_CHECKS, TRIES - case.evidence.runs)
    for text, reading in itertools.islice(_neighbours(case, proved), checks):
        others = leaves_of(reading)
        if all(np.array_equal(leaves[path], others[path]) for path in leaves):
            continue  # the exchanged leaves have equal values
        if case.evidence.compare(others).is_rounding:
            doubtful.append(text)
    if doubtful:
        raise CheckpointMismatch(
            "The Flax model gives torch's outputs, but also with some layers exchanged, so the "
            "example does not tell which is which. Use other inputs, or answer with these "
            "arguments.",
            ambiguous=doubtful,
            parameters=("rules", "conv1d", "conv_transpose", "flatten"),
        )


def refusal(
    case: Case,
    difference: Difference,
    reading: Reading,
    tensors: Collection[str],
    first_other: str,
) -> CheckpointMismatch:
    """Returns the error if no reading gives torch's outputs, with the layers in doubt.

    Args:
      case: The two models and the example.
      difference: The difference of the nearest outputs.
      reading: The reading that gives them.
      tensors: The names of the torch tensors.
      first_other: A sentence about the first layer with other inputs than in torch, or "".
    """
    doubtful = [text for text, _ in itertools.islice(_neighbours(case, reading), _SHOWN)]
    hint = "No layer is in doubt, so the two models seem to compute different functions"
    if difference.largest < _SLIGHT:
        hint = "So small a difference is rarely a wrong layer, and often another formula"
    elif doubtful:
        hint = (
            "The layers in doubt are listed; answer for those that you know (rules, flatten, "
            "conv1d, conv_transpose). If all are right, the models compute different functions"
        )
    if not case.evidence.is_recorded:
        first_other = (
            "The example has no record of torch's calls, which finds layers one after the other; "
            "pass example=torch_bridge.run_example(module, inputs) if you have the torch module. "
        )
    return CheckpointMismatch(
        f"{reparametrized(tensors)}The Flax model does not give torch's outputs: after "
        f"{case.evidence.runs} tries the nearest are {difference}. {first_other}{hint}: "
        f"{OTHER_FORMULA}",
        ambiguous=doubtful,
        parameters=("apply", "rules", "flatten", "conv1d", "conv_transpose"),
    )


def reparametrized(names: Collection[str]) -> str:
    """Returns advice for weights that torch computes from other tensors; "" if there are none."""
    sentences = ""
    for sentence, pattern in _REPARAMETRIZED.items():
        if any(map(re.compile(pattern).match, names)):
            sentences += f"{sentence} "
    return sentences


def _neighbours(case: Case, reading: Reading) -> Iterator[Change]:
    """Yields one changed reading for each choice that names do not decide."""
    choices = forms(case, reading)
    for choice in itertools.chain(*flattened_maps(case, reading)):
        if choice.layers[0] in reading.answers:
            choices.append(choice)
    for choice in packed_rows(case, reading):
        packing = reading.answer(choice.layers[0]).packing
        if packing and packing.is_in_order:
            # Parts in torch's order need no proof that another order is wrong.
            in_order = filter(lambda value: value is None or value.is_in_order, choice.values)
            choice = choice._replace(values=list(in_order))
        if packing:
            choices.append(choice)
    yield from changed(reading, choices)
    named = case.match.by_name.union(case.match.ruled.partners)
    for alike in grouped(reading.partners, lambda layer: layer.sizes).values():
        for one, other in itertools.pairwise(alike):
            if not {one, other} <= named:
                yield from exchanged(case.match, reading, [one], [other])
