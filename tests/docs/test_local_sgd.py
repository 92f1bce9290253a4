"""The Python of docs/local_sgd.md runs, from top to bottom."""

import re

import jax
import numpy as np
from paths import DOCS

PAGE = DOCS / "local_sgd.md"


def test_the_page_runs():
    blocks = re.findall(r"(?<!-->\n)```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 6
    names = {}
    with jax.numpy_dtype_promotion("standard"):  # what a user has
        exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    # The fit of the first program: y is the sum of x.
    np.testing.assert_allclose(names["params"]["w"], np.ones((5, 1)), atol=0.1)
    assert names["stats"].ratio == 32
