"""benchmarks.first_contact: what counts as right, and what does not."""

import json

import jax

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
