"""Outputs of every set of options, as they were before the step was written anew (d55f995)."""

import jax.numpy as jnp
import numpy as np
import pytest
import record
from paths import ROOT

RECORDED = np.load(ROOT / "tests/jaxcomp/reducers/data/recorded.npz")
CASES = record.cases()
STEPS, EVERY = (0, 4, 9), 8  # which of ten steps, and which values of their outputs


def allowed(name):
    """Of the largest value: rounding that ten steps carry on, or a level that is missed."""
    levels = {"int6": 31, "int8": 127, "quantized": 127}
    found = [count for word, count in levels.items() if word in name]
    narrow = {"bfloat16": 2**-7, "float16": 2**-9}
    rounded = [unit for word, unit in narrow.items() if name.endswith(word)]
    return 2 / found[0] if found else rounded[0] if rounded else 1e-4


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_that_were_recorded(name):
    steps = record.run(CASES[name], jnp.float32, "vmap", None)
    outputs = [
        np.concatenate([x.reshape(-1) for x in steps[t][: len(record.SHAPES)]]) for t in STEPS
    ]
    expected = RECORDED[name]
    found = np.stack(outputs)[:, ::EVERY]
    assert np.abs(found - expected).max() <= allowed(name) * np.abs(expected).max()
