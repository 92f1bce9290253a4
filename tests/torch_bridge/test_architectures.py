"""Models of many kinds: an example finds out what belongs together; without one, pair asks."""

import contextlib
import re

import numpy as np
import pytest

import torch_bridge
from tests.helpers import architectures
from tests.helpers.control import assert_no_further
from torch_bridge import CheckpointMismatch

# Some of each sort; `python -m tests.helpers.architectures` goes through all.
PROVED = (
    *("VGG", "GPT-2", "generator", "two heads of convolutions", "LSTM"),
    *("MLP of colour images", "MLP in nested calls", "blocks numbered backwards", "FCN-8s"),
    *("conditional discriminator", "projection discriminator", "PReLU and ParameterList"),
    *("highway", "biaffine", "LoRA", "packed projections", "DLRM", "TextCNN", "WaveNet"),
    "Llama, tied",
)
ANSWERED = (
    *("VGG", "ResNet-18", "U-Net", "BatchNorm everywhere", "generator", "ViT", "LSTM", "GPT-2"),
    *("two heads of convolutions", "BERT"),
)
OTHERS = [name for name, case in architectures.CASES.items() if case.answers is None]


@pytest.mark.parametrize("name", PROVED)
def test_an_example_needs_no_answer_and_the_way_back_is_exact(name):
    built = architectures.build(name)
    state = built.module.state_dict()
    evidence = {"apply": built.flax.apply, "example": built.example()}
    pairs = torch_bridge.pair(state, built.like, **evidence)
    variables = torch_bridge.params_from_torch(state, built.like, pairs=pairs)
    assert built.difference(variables) < 3e-6
    back = torch_bridge.params_to_torch(variables, state, pairs=pairs)
    for key, value in state.items():
        if not re.search(r"bias_ih|bias_hh", key):  # of which Flax has the sum
            np.testing.assert_array_equal(back[key], value, err_msg=key)


@pytest.mark.parametrize("name", ANSWERED)
def test_without_an_example_the_answers_are_those_that_the_error_asks_for(name):
    built = architectures.build(name)
    answers = architectures.CASES[name].answers
    state = built.module.state_dict()
    like = built.like
    if answers:
        with pytest.raises(CheckpointMismatch) as error:
            torch_bridge.pair(state, like)
        assert not error.value.missing + error.value.unexpected + error.value.mis_shaped
        asked = str(error.value)
        for option in answers.keys() & {"flatten", "unflatten"}:
            for pattern, shape in answers[option].items():
                assert f"{option}={{{pattern!r}: {shape}}}" in asked
        assert all(f"{option}=" in asked for option in answers)
    said = contextlib.nullcontext()
    if name == "GPT-2":  # whose c_attn packs query, key and value on both sides
        said = pytest.warns(UserWarning, match="if the outputs are several parts")
    with said:
        variables = torch_bridge.params_from_torch(state, like, **answers)
    assert built.difference(variables) < 3e-6


@pytest.mark.parametrize("name", OTHERS)
def test_without_an_example_nothing_is_wrong_without_a_word(name):
    built = architectures.build(name)
    with contextlib.suppress(CheckpointMismatch):
        variables = torch_bridge.params_from_torch(built.module.state_dict(), built.like)
        assert built.difference(variables) < 3e-6


# Kinds for which plain=True asks, or names an assumption that is wrong; and kinds where it is right
# and names none.
DOUBTFUL = (
    *("BatchNorm everywhere", "GPT-2", "MLP of colour images", "MLP in nested calls"),
    *("depthwise with GroupNorm, nested", "blocks numbered backwards", "DCGAN's generator"),
    *("conditional discriminator", "VGG", "Siamese"),
)
PLAIN = ("ResNet-18", "DenseNet, small", "MobileNet", "ConvNeXt", "ViT", "BERT", "Whisper", "T5")


@pytest.mark.parametrize("name", DOUBTFUL)
def test_plain_is_not_wrong_without_a_word(name):
    built = architectures.build(name)
    with pytest.raises((CheckpointMismatch, UserWarning)) as error:
        torch_bridge.params_from_torch(built.module.state_dict(), built.like, plain=True)
    assert "apply= and example=" in str(error.value)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_names_no_assumption_that_shapes_support(name):
    built = architectures.build(name)
    variables = torch_bridge.params_from_torch(built.module.state_dict(), built.like, plain=True)
    assert built.difference(variables) < 3e-6


def test_the_losses_are_those_of_the_run_that_stayed():
    moved, stayed, controls = architectures.there_and_back("GPT-2", steps=(2, 4, 2))
    assert_no_further(moved, stayed, *controls, terms=200)
