"""Every ``>>>`` example in the public docstrings runs and prints what it says."""

import doctest
import importlib
import pkgutil

import jax
import pytest

import jaxcomp


def modules():
    return [
        f"jaxcomp.{m.name}" for m in pkgutil.iter_modules(jaxcomp.__path__) if m.name != "__main__"
    ]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    with jax.numpy_dtype_promotion("standard"):  # what a user has
        result = doctest.testmod(importlib.import_module(name), raise_on_error=False)
    assert result.failed == 0


def test_every_public_name_is_documented_with_an_example():
    for name in jaxcomp.__all__:
        assert getattr(jaxcomp, name).__doc__, name
    for name in ("powersgd", "allreduce", "local_value_and_grad", "consolidate", "shard_state"):
        assert ">>>" in getattr(jaxcomp, name).__doc__
