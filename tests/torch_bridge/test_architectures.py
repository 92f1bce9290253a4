"""Models of many kinds move exactly, or ask in a sentence that can be answered from it."""

import math
import re

import numpy as np
import pytest

import torch_bridge
from tests.helpers import architectures
from tests.helpers.control import assert_no_further
from torch_bridge import CheckpointMismatch


@pytest.mark.parametrize("name", architectures.CASES)
def test_the_outputs_are_equal_and_the_way_back_is_exact(name):
    built, answers = architectures.build(name), architectures.CASES[name].answers
    state, like = built.module.state_dict(), built.like
    if answers:
        with pytest.raises(CheckpointMismatch) as error:
            torch_bridge.pair(state, like)
        assert not error.value.missing + error.value.unexpected + error.value.mis_shaped
        assert set(answers) <= set(error.value.parameters)
        asked = "\n".join(error.value.ambiguous)
        for option in answers.keys() & {"flatten", "unflatten"}:
            for pattern, shape in answers[option].items():
                said = rf"{option}=\{{'{pattern}': {re.escape(str(shape)) if shape else ''}"
                assert re.search(said, asked), asked
    pairs = torch_bridge.pair(state, like, **answers)
    variables = torch_bridge.params_from_torch(state, like, pairs=pairs)
    theirs, ours = built.outputs(variables)
    np.testing.assert_allclose(ours, theirs, atol=3e-6 * np.abs(theirs).max(), rtol=0)
    back = torch_bridge.params_to_torch(variables, state, pairs=pairs)
    for key, value in state.items():
        if not re.search(r"bias_ih|bias_hh", key):  # of which Flax has the sum
            np.testing.assert_array_equal(back[key], value, err_msg=key)


@pytest.mark.parametrize("name", ["VGG", "GPT-2"])
def test_the_losses_are_those_of_the_run_that_stayed(name):
    losses = architectures.there_and_back(name, steps=(2, 4, 2))
    module = architectures.build(name).module
    terms = sum(math.prod(parameter.shape[1:]) for parameter in module.parameters())
    assert_no_further(losses.moved, losses.stayed, *losses.controls, terms=terms)
