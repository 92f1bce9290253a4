"""benchmarks.first_contact: what counts as right, and what is said first."""

import json
from types import SimpleNamespace

import jax
import numpy as np

from benchmarks import first_contact


def test_a_form_is_compared_with_every_kind_of_gradient(monkeypatch, capsys):
    """On two devices of one kind nothing differs; a third of a level more than allowed does."""
    form = first_contact.forms()["rank 4"]
    monkeypatch.setattr(first_contact, "forms", lambda: {"rank 4": form})
    with jax.numpy_dtype_promotion("standard"):
        first_contact.compare_forms(small=True)
    row = json.loads(capsys.readouterr().out)
    assert row["right"], row
    assert set(row["apart"]) == set(first_contact.KINDS)
    assert max(row["apart"].values()) < 1e-6


def test_a_form_that_fails_is_said_and_costs_no_other(monkeypatch, capsys):
    broken = (SimpleNamespace(axis_name="data"), "float32", 1e-3)
    monkeypatch.setattr(first_contact, "forms", lambda: {"broken": broken})
    first_contact.compare_forms(small=True)
    row = json.loads(capsys.readouterr().out)
    assert not row["right"]
    assert "must be a jaxcomp reducer" in row["error"]


def test_how_far_two_trees_are_apart():
    one, other = {"a": np.array([1.0, np.nan]), "b": np.zeros(2)}, {"a": np.array([1.5, np.nan])}
    assert first_contact.apart(one, one | other) == 0.5 / 1.5
    assert first_contact.apart(one, one | {"a": np.array([1.0, 2.0])}) == np.inf
    assert first_contact.apart({"b": np.ones(1)}, {"b": np.zeros(1)}, largest=4.0) == 0.25


def test_the_summary_says_what_was_measured_and_what_is_wrong():
    times = [{"kind": "copy", "rank": 4, "seconds": [1e-3]}, {"kind": "versions"}]
    rows = [{"form": "a", "right": True}, {"form": "b", "right": False, "error": "no"}]
    parts = {
        "jax": {"code": 0, "found": [*times, {"kind": "update", "rank": 4, "seconds": [3e-3]}]},
        "torch": {"code": -9, "found": []},
        "forms": {"code": 0, "found": rows},
    }
    said = first_contact.summary(parts).splitlines()
    assert said[0] == "rank   4: jax 3.00 ms, copy 1.00 ms"
    assert said[1] == "rank  32: not measured"
    assert said[3:] == ["1 of 2 forms are right", "  wrong: b: no", "torch ended with -9"]
