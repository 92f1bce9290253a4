"""Models of many kinds move exactly, or ask in a sentence that can be answered from it."""

from __future__ import annotations

import re

import architectures
import jax
import numpy as np
import pytest

import torch_bridge
from torch_bridge import CheckpointMismatch

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", architectures.CASES)
def test_the_outputs_are_equal_and_the_way_back_is_exact(name):
    case = architectures.CASES[name]
    module, twin, theirs, ours = architectures.build(name)
    like = jax.eval_shape(twin.init, jax.random.key(0), *ours)
    state = module.state_dict()
    if case.answers:
        with pytest.raises(CheckpointMismatch) as error:
            torch_bridge.pair(state, like)
        assert not error.value.missing + error.value.unexpected + error.value.mis_shaped
        asked = "\n".join(error.value.ambiguous)
        for option, said in case.answers.items():
            assert option in error.value.parameters
            for pattern, shape in said.items() if isinstance(said, dict) else ():
                known = re.search(rf"{option}=\{{'{pattern}': ", asked)
                assert known, asked
                assert f"'{pattern}': {shape}" in asked or shape is None
    pairs = torch_bridge.pair(state, like, **case.answers)
    variables = torch_bridge.params_from_torch(state, like, pairs=pairs)
    a, b = architectures.outputs(module, twin, variables, theirs, ours)
    np.testing.assert_allclose(b, a, atol=3e-6 * np.abs(a).max(), rtol=0)
    back = torch_bridge.params_to_torch(variables, state, pairs=pairs)
    for key, value in state.items():
        if not re.search(r"bias_ih|bias_hh", key):  # of which Flax has the sum
            np.testing.assert_array_equal(back[key], value, err_msg=key)


@pytest.mark.filterwarnings("ignore:unused/bias, unused/kernel:UserWarning")
@pytest.mark.parametrize("name", ["VGG", "GPT-2", "frozen and unused parts"])
def test_the_losses_are_those_of_the_run_that_stayed(name):
    assert max(architectures.there_and_back(name, steps=(2, 4, 2))) < 1e-4
