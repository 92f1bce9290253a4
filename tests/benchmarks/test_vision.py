"""The study of a convolutional network: its task, its strategies, its table."""

from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks.vision.__main__ as vision
from benchmarks.common.runs import read_runs
from benchmarks.vision import report
from benchmarks.vision.settings import RATES, STRATEGIES, bytes_sent
from benchmarks.vision.task import CLASSES, SIZE, Conv, digits, draw
from benchmarks.vision.training import Config

TINY = Config(4, 2, 2, 2, 1, 500)
ABOUT = {"date": "2026-11-22 08:00 UTC", "machine": {"cpu": "a processor", "versions": {}}}


@pytest.mark.parametrize(("window", "stride"), [(3, 1), (3, 2), (1, 2)])
def test_the_convolution_is_one(window, stride):
    x = np.random.default_rng(0).standard_normal((2, 8, 8, 3)).astype(np.float32)
    layer = Conv(5, window, stride)
    params = layer.init(jax.random.key(0), x)
    edge = window // 2
    expected = jax.lax.conv_general_dilated(
        x,
        params["params"]["kernel"],
        (stride, stride),
        [(edge, edge), (edge, edge)],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    np.testing.assert_allclose(layer.apply(params, x), expected, atol=1e-5)


def test_held_out_digits_are_never_trained_on_and_every_draw_differs():
    train, held_out = digits()
    assert len(train.labels) + len(held_out.labels) == 1797
    assert set(np.unique(held_out.labels)) == set(range(CLASSES))
    images, labels = draw(held_out, jax.random.key(1), 6)
    assert images.shape == (6, SIZE, SIZE, 1)
    assert labels.shape == (6,)
    again, _ = draw(held_out, jax.random.key(2), 6)
    assert jnp.abs(images - again).max() > 0.1


def test_int8_factors_send_fewer_bytes_than_float32_ones_and_than_int8_gradients():
    config = Config()
    sent = {name: bytes_sent(name, config, 0.1) for name in STRATEGIES if "spectrum" not in name}
    assert sent["r4-int8"] < sent["r4"] < sent["int8"] < sent["allreduce"]
    parameters = sum(x.size for x in jax.tree.leaves(config.params()))
    assert 100_000 < parameters < 300_000
    assert sent["allreduce"] >= 4 * parameters


def test_a_run_learns_and_is_not_made_again(tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    with jax.numpy_dtype_promotion("standard"):  # what optax's cosine schedule needs
        vision.train(path, TINY, "r4-int8", 0.1, [0])
    (run,) = read_runs(path)
    assert run["curve"][-1][0] == TINY.steps
    assert 1.5 < run["curve"][-1][1] < 4
    assert run["bytes"] == TINY.steps * bytes_sent("r4-int8", TINY, 0.1)
    assert "r4-int8" in capsys.readouterr().out
    vision.train(path, TINY, "r4-int8", 0.1, [0])
    assert not capsys.readouterr().out


def test_the_table_is_of_the_best_learning_rate():
    def run(strategy, rate, seed, loss, sent):
        own = {"strategy": strategy, "rate": rate, "seed": seed, "bytes": sent, "about": ABOUT}
        return own | {"curve": [[2, 3.0, 0.1], [4, loss, 0.75]], "config": asdict(TINY)}

    runs = [run("allreduce", rate, 0, 1 + abs(rate - 0.1), 400) for rate in RATES]
    page = "a\n<!-- python -m benchmarks.vision --report -->\nold\n<!-- end -->\nb\n"
    with pytest.raises(ValueError, match="not every learning rate"):
        report.paged(page, runs[1:], TINY)
    runs += [run("allreduce", 0.1, 1, 2.0, 400), run("r4", 0.1, 0, 1.1, 40)]
    runs += [run("r4", 0.1, 1, 2.4, 40), run("r4", 0.2, 0, 9.0, 40)]
    text = report.paged(page, runs, TINY)
    assert "| rank 4 | 10.0x | 1.750 ± 0.919 | +15.0% ± 63.5 | 75.0% | 2 |" in text
    assert "Learning rate 0.1, the best of the exact run." in text
    assert "old" not in text


def test_the_page_shows_the_table_of_the_results():
    page = report.PAGE.read_text()
    assert report.paged(page, read_runs(vision.OUT), Config()) == page


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["--steps", "250"], "multiple of 200"), (["--seeds", "0"], "`--seeds` must be at least 1")],
)
def test_wrong_arguments_are_one_sentence(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        vision.main(arguments)
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err
