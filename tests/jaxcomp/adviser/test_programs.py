"""Kernels and words of an update for GPUs, as the adviser predicts them."""

import jax
import jax.numpy as jnp
import pytest

from jaxcomp._adviser import programs
from jaxcomp._adviser.programs import FORMS, Form, Program, gpu_program
from jaxcomp._lowrank.matricize import plan_leaves

LEAVES = {
    "a": jax.ShapeDtypeStruct((100, 50), jnp.float32),
    "b": jax.ShapeDtypeStruct((100, 50), jnp.float32),
    "c": jax.ShapeDtypeStruct((64, 64), jnp.float32),
    "bias": jax.ShapeDtypeStruct((50,), jnp.float32),
}


def test_a_program_by_hand(monkeypatch):
    form = Form(7, (1e6, 1e5, 1e4, 1e3, 1e2, 1e1, 1.0), (0.5, 0.25, 3.0, 20.0, 2.0, 0.125))
    monkeypatch.setitem(programs.FORMS, "form", form)
    values, factors = 2 * 5_000 + 64 * 64, 2 * 150 + 128
    plans = plan_leaves(LEAVES, 4, 2.0)
    words = (7 + 0.5) * values + (2 + 3) * 50 + (20 + 2 * 2) * 4 * factors + 0.125 * 10_000
    # Once and twice for the two doublings; two shapes, a stack and a leaf (of rank above 1), the
    # second leaf of the stack, a bias.
    assert gpu_program("form", plans) == Program(1222211, words)
    assert gpu_program("form", plans, buckets=3).kernels == 3622211
    assert gpu_program("form", plan_leaves(LEAVES, 1, 2.0)).kernels == 1022011
    # Above rank 8 values cost more. Two of the leaves are no longer compressed there.
    plans = plan_leaves(LEAVES, 16, 2.0)
    assert [plan.rank for plan in plans] == [16, 16, 0, 0]
    words = (7.75 + 0.125) * 10_000 + 5 * (50 + 64 * 64) + (20 + 2 * 4) * 16 * 300
    assert gpu_program("form", plans) == Program(1411112, words)
    assert gpu_program("form", plan_leaves(LEAVES, 99, 2.0)) == Program(1000004, 5 * 14_146)


@pytest.mark.parametrize("name", FORMS)
def test_no_form_launches_or_moves_less_for_more(name):
    form = FORMS[name]
    assert len(form.kernels) == 7
    assert len(form.words) == 6
    assert all(x >= 0 for x in (*form.kernels, *form.words))
    kernels = [gpu_program(name, plan_leaves(LEAVES, r, 2.0)).kernels for r in (1, 2, 8)]
    assert kernels == sorted(kernels)
