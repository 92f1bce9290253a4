"""Every measured number in README and on the two pages of measurements comes from committed rows.

What is measured is told by its unit: per cent, times, milliseconds, points. Such a number stands in
a table that a report writes, in a sentence that is made here from the rows, in a paragraph that
names its source, or in one of the few sentences that say how something was measured.
"""

import functools
import json
import re
from dataclasses import asdict
from statistics import mean

import numpy as np
import pytest

import jaxcomp
from benchmarks.cluster.report import all_figures
from benchmarks.common.paths import RESULTS, ROOT
from benchmarks.common.runs import read_runs
from benchmarks.common.tables import half_width, with_interval
from benchmarks.convergence import training
from benchmarks.convergence.runs import results
from benchmarks.convergence.strategies import EXACT, STRATEGIES, by_name
from benchmarks.optimizers import settings, tail
from benchmarks.optimizers.laws import (
    error_from_one_rank,
    from_one_rank,
    in_sample,
    points,
    predicted,
)
from benchmarks.optimizers.report import made
from benchmarks.time_to_loss import report
from benchmarks.time_to_loss.task import Config
from jaxcomp._bytes.gap import LAWS, TAIL_LAWS

PAGES = ("README.md", "docs/performance.md", "docs/convergence.md", "docs/choosing.md")
UNIT = r"\s?(?:%|ms\b|times\b|points\b|x\b|s\b)"
MEASURED = re.compile(rf"(?:±\s?)?\d[\d,.]*(?:{UNIT})|±\s?\d[\d,.]*|\d[\d,.]*(?=\s?±)")
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NUMBERS += ["eleven", "twelve"]
# A paragraph with one of these says where its numbers come from.
SOURCES = re.compile(
    r"commit [0-9a-f]{7}, |#on-a-gpu|results/[\w-]+\.md|data sheet|arXiv|by the formula"
)
COMMIT = re.compile(r"(?:(?:are|is) in|torch [\d.]+,)\s+commit\s+[0-9a-f]{7}")
# How something is measured or defined, and arithmetic beside it.
STATED = (
    "intervals of 95%", "a 95% interval", "95% intervals", "Intervals are 95%",
    "within 1% of", "and 1% more",
    "10% warm-up", "10% exact steps", "the first 10% of the steps", "(95%)", "differ by 1%",
    "10% to 90%", "which are 1%, 3% and a tenth", "above exact (95%)",
    "a third of the width", "100% of", "whose step is within 10% of the fastest",
    "A predicted gain below 10%", "at least 1.1 times as fast", "or within 0.2 points",
    "a quarter or 0.2 points",
)  # fmt: skip


def study(name, optimizer="adamw"):
    (found,) = [s for s in settings.STUDIES if (s.optimizer, s.name) == (optimizer, name)]
    return made(found, optimizers_runs())


def rank_in(results, rank, wire="int6"):
    """Gaps in per cent and the ratio of bytes of a rank in a study."""
    exact = next(iter(results.values()))
    for setting, result in results.items():
        if (setting.rank, setting.wire) == (rank, wire):
            return result.gaps(exact), exact.sent / result.sent
    raise LookupError(rank)


def over_links():
    runs = []
    for run in read_runs(RESULTS / "time_to_loss.jsonl"):
        if "seconds" in run or run["config"] == asdict(Config()):
            runs.append(run)
    return report.results(runs)


def readme():
    gaps, ratio = rank_in(study("width 512"), 48)
    yield f"{ratio:.0f} times fewer bytes than float32 ({ratio / 2:.0f} times fewer than bfloat16)"
    gap = f"{mean(gaps):.2f} ± {half_width(gaps):.2f}%"
    yield f"its loss ended {gap} above the loss without compression (rank 48"
    yield ranks_later_at_512(settings.LATER[1])
    yield from of_the_program()
    yield "{} of {} predictions that were made".format(*counts_from_one_rank())
    found = over_links()
    exact = found[report.EXACT]
    low_rank = found["jax/powersgd-32-int6"]
    hook = found["torch/powersgd-32"]
    gaps = low_rank.gaps(exact)
    fewer = exact.sent / low_rank.sent
    yield f"{fewer:.0f} times fewer bytes than float32"
    yield f"and {fewer / 2:.0f} times fewer than bfloat16, and "
    yield f"its loss ends {mean(gaps):.1f} ± {half_width(gaps):.1f}% above the exact one (AMD EPYC"

    for rate, words in (
        ("10mbit", "| 10 Mbit/s | {} | {}, with 16-bit factors |"),
        ("100mbit", "| 100 Mbit/s | {} | {}, with 16-bit factors |"),
        ("1gbit", "| 1 Gbit/s | {} | {}, with float32 factors"),
    ):
        times = report.sooner_than_the_best(found, low_rank, rate).values()
        yield words.format(*times).replace("x ±", " ±")
    # What was advised before: a tenth of the steps exact.
    params = settings.WIDE_ONCE.params()
    late = jaxcomp.powersgd(32, axis_name="data", start_step=48, comm_dtype="int6")
    ratio = late.bytes(params, replicas=2, steps=480).ratio
    steps = {name: mean(found[name].reached.values()) for name in found if found[name].reached}
    step = {name: found[name].clock("100mbit", 1) for name in steps}
    mixed = 0.1 * step[report.EXACT] + 0.9 * step[low_rank.name]
    goal = steps[report.EXACT] * step[report.EXACT]
    sooner = []
    for result in (low_rank, hook):
        times = mean(result.sooner_than(exact, "100mbit"))
        sooner.append(f"{times:.1f} ± {report.times_half_width(result, exact, '100mbit'):.1f}")
    after_exact = goal / (steps[low_rank.name] * mixed)
    yield f"| from the first step on | {fewer:.0f}, {fewer / 2:.0f} | {sooner[0]} |"
    yield f"| {ratio:.1f}, {ratio / 2:.1f} | {after_exact:.1f}, calculated"
    fewer = exact.sent / hook.sent
    yield f"| {fewer:.0f}, {fewer / 2:.1f} | {sooner[1]} |"


def of_the_program():
    """Yields what the program of the README sends in its 100 steps, at two ranks."""
    params = {"hidden": np.zeros((64, 256), np.float32), "output": np.zeros((256, 64), np.float32)}
    for rank in (8, 24):
        reducer = jaxcomp.powersgd(rank, axis_name="data", start_step=0, comm_dtype="int6")
        run = reducer.bytes(params, replicas=4, steps=100)
        if rank == 8:
            yield f"hands {run.bytes_after:,} bytes to the collectives, {run.ratio:.1f} times fewer"
            yield f"than the {run.bytes_before:,} of float32"
        else:
            yield f"{run.ratio:.1f} times fewer bytes. In our language models"


def performance():
    run = json.loads((RESULTS / "cluster.json").read_text())
    figures = all_figures(run["cases"])

    def step(strategy, framework="jax", rate="1gbit"):
        return figures["transformer", rate, strategy, framework].median

    for rate in ("1gbit", "100mbit"):
        ours = step("powersgd-32-int6", rate=rate)
        hooks = ("powersgd-32", "powersgd-32-fp16")
        hook = min(step(strategy, "torch", rate) for strategy in hooks)
        half = min(step("fp16", framework, rate) for framework in ("jax", "torch"))
        yield f"{hook / ours:.1f} times faster than with torch's hook"
        yield f"{half / ours:.1f} times faster than with the best 16-bit all-reduce"
    alone = {framework: step("none", framework) for framework in ("jax", "torch")}
    yield f"{1e3 * alone['jax']:.0f} ms in JAX and {1e3 * alone['torch']:.0f} ms in torch"
    added = step("powersgd-32-int6") - alone["jax"]
    times = (step("powersgd-32", "torch") - alone["torch"]) / added
    yield f"the hook adds {times:.1f} times as much time to it"
    exact = rank_of_rates()
    yield f"At twice that the exact run ends {exact:.1f}% higher"


def rank_of_rates():
    """Returns how far above the best rate twice that ends, at width 512, in per cent."""
    losses = {}
    for run in optimizers_runs():
        setting = run["setting"]
        wide = training.Config(**run["config"]) == settings.WIDE_ONCE and run["seed"] == 0
        exact = not setting["rank"] and not setting["ratio"]
        if wide and exact and setting["optimizer"] == "adamw":
            losses[setting["rate"]] = run["curve"][-1][1]
    return 100 * (losses[1e-3] / losses[5e-4] - 1)


def by_spectrum_at_512():
    """Returns how many points lower ranks by spectrum ended than rank 48, and their gap."""
    exact, *compressed = study("width 512").items()
    gaps = {setting.sent: result.gaps(exact[1]) for setting, result in compressed}
    spectrum = gaps["ranks by spectrum 35.9x, int6"]
    pairs = zip(gaps["rank 48, int6"], spectrum, strict=True)
    lower = [equal - by_leaf for equal, by_leaf in pairs]
    gap = f"{mean(spectrum):.2f} ± {half_width(spectrum):.2f}%"
    return f"{mean(lower):.2f} ± {half_width(lower):.2f}", gap


def by_spectrum():
    """Yields how much lower ranks by spectrum ended, at the bytes of two settings."""
    for equal, spectrum in (
        ("powersgd-r4", "spectrum-r4"),
        ("powersgd-r16-int8", "spectrum-r16-int8"),
    ):
        yield lower(equal, spectrum)


def lower(first, second):
    """Writes how many points lower the second strategy ended, by seed."""
    pairs = zip(convergence_runs(first), convergence_runs(second), strict=True)
    differences = [a - b for a, b in pairs]
    return f"{mean(differences):.1f} ± {half_width(differences):.1f}"


def convergence():
    runs = optimizers_runs()
    tails = read_runs(tail.OUT)
    adamw = TAIL_LAWS["adamw"]
    muon = TAIL_LAWS["muon"]
    yield f"{adamw.c} and {adamw.power} for AdamW, to {adamw.ranks} ranks"
    yield f"{muon.c} and {muon.power} for Muon"
    yield from apart_on_two_processors()
    yield "rank 48 by {} points. It ended {} from the exact runs".format(*by_spectrum_at_512())
    narrow, wide, widest = settings.FIRST_STEPS
    after_5 = ended_lower(wide, (21, 0, 0), (19, 5, 0))
    after_14 = ended_lower(wide, (21, 0, 0), (19, 14, 0))
    yield f"14 exact steps ended {after_5} and {after_14} above rank 21"
    yield f"48 exact steps ended {ended_lower(wide, (21, 0, 0), (11, 48, 0))} above rank 21"
    rank_9 = ended_lower(wide, (11, 0, 0), (9, 5, 0))
    yield f"Rank 9 after 5 exact steps ended {rank_9} above rank 11"
    yield f"steps ended {ended_lower(narrow, (5, 48, 0), (5, 0, 0))} lower than rank 5"
    yield f"rank 11 ended {ended_lower(narrow, (11, 0, 0), (5, 48, 0))} lower still"
    yield f"ended {ended_lower(narrow, (11, 0, 0), (8, 48, 21))} above rank 11"
    yield from at_width_128()
    yield from at_width_512(widest)
    yield from later(*settings.LATER)
    yield from by_kind_of_leaf(runs, tails)
    fits = in_sample(runs, tails)
    exponents = [f"{fits[name][0].power:.2f}" for name in ("sgd", "lion", "adafactor")]
    yield f"its exponents are {exponents[0]}, {exponents[1]} and {exponents[2]}, where AdamW's is"
    by_tail = by_width = 0
    for point in predicted(runs, tails):
        by_tail += within_a_quarter(point.gap, 100 * adamw.gap(point.tail))
        by_width += within_a_quarter(point.gap, point.guess)
    yield f"{NUMBERS[by_tail].capitalize()} of the {NUMBERS[len(settings.PREDICTED)]} mean gaps"
    yield f"{NUMBERS[by_width].capitalize()} are within a quarter of the law in width and tokens"
    ratios = []
    of_other_kinds = [each for each in settings.PREDICTED if each.config.kind != "transformer"]
    for two_ranks in of_other_kinds:
        low, high = points([two_ranks], runs, tails)
        ratios.append((high.gap / low.gap, (high.tail / low.tail) ** adamw.power))
    (convolutions, in_their_tails), (encoder, in_its_tails) = ratios
    yield f"the encoder's gap grew to {encoder:.1f} times"
    yield f"as its tails foretold ({in_its_tails:.1f})"
    yield f"grew to {convolutions:.1f} times, where the tails foretold {in_their_tails:.1f}"
    yield from of_one_rank()
    yield f"error {100 * error_from_one_rank(runs, tails):.0f}%"
    ranks = lower("powersgd-r4", "powersgd-r16-int8")
    yield f"rank 16 in int8 ended {ranks} points lower than rank 4 in float32"
    float32, int8 = by_spectrum()
    yield f"{float32} points lower with the bytes of rank 4, and {int8} lower with those of"


def behind(optimizer, first, second):
    """Writes how many points lower the second of two settings ended at width 128, by seed."""
    by_setting = study("", optimizer)
    exact = next(iter(by_setting.values()))
    gaps = {setting.sent: result.gaps(exact) for setting, result in by_setting.items()}
    pairs = zip(gaps[first], gaps[second], strict=True)
    return with_interval([one - other for one, other in pairs], ".1f")


def at_width_128():
    """Yields what narrower factors and ranks by spectrum gained over eight seeds."""
    eight_bits, six_bits, by_leaf = (
        "rank 16, int8",
        "rank 21, int6",
        "ranks by spectrum 20.2x, int6",
    )
    yield f"ended {behind('adamw', eight_bits, six_bits)} points lower behind AdamW, and"
    yield f"{behind('muon', eight_bits, six_bits)} points lower behind Muon"
    by_setting = study("")
    sent = {setting.sent: result.sent for setting, result in by_setting.items()}
    more = sent[by_leaf] / sent[six_bits] - 1
    yield f"with {100 * more:.0f}% more bytes than rank 21"
    yield f"it ended {behind('adamw', six_bits, by_leaf)} points lower behind AdamW, which may be"
    yield f"{behind('muon', six_bits, by_leaf)} points lower behind Muon"


def at_width_512(study):
    """Yields how exact first steps did at width 512, with the bytes of rank 48."""
    yield f"go through int8, ended {ended_lower(study, (48, 0, 0), (5, 48, 0))} above rank 48"


def later(narrow, wide):
    """Yields what ranks from a run's own first quarter gained."""
    by_spectrum = ended_lower(narrow, (0, 120, 21), (21, 0, 0))
    yield f"At width 128 they ended {by_spectrum} lower than rank 21"
    _, equal, spectrum = made(narrow, optimizers_runs()).values()
    yield f"with {100 * (spectrum.sent / equal.sent - 1):.0f}% more bytes"
    yield ranks_later_at_512(wide)


def ranks_later_at_512(wide):
    """Writes what the whole run sent and lost with ranks from its own first quarter."""
    exact, *_, later = made(wide, optimizers_runs()).values()
    fewer = exact.sent / later.sent
    return (
        f"the whole run sent {fewer:.0f} times fewer bytes than float32 ({fewer / 2:.0f} times "
        f"fewer than bfloat16), and {gap_of_ranks_later(wide)}"
    )


def gap_of_ranks_later(wide):
    """Writes what a run lost with ranks from its own first quarter."""
    exact, *_, later = made(wide, optimizers_runs()).values()
    return f"its loss ended {with_interval(later.gaps(exact), '.2f')}% above the exact one"


def by_kind_of_leaf(runs, tails):
    """Yields what one kind of leaf alone cost, and factors in float32."""
    by_setting = made(settings.BY_KIND, runs)
    exact = next(iter(by_setting.values()))
    left_out = tail.find(settings.BY_KIND, tails)
    gaps = {}
    for setting, result in by_setting.items():
        gaps[setting.kept, setting.wire] = result.gaps(exact)
    in_all = 0.0
    for_tail = []
    for_decrease = []
    for (kept, _), several in gaps.items():
        if " " in kept:  # a kind
            in_all += mean(several)
            for_tail.append(mean(several) / left_out[kept])
            for_decrease.append(mean(several) / left_out[f"{kept}{tail.OF_DECREASE}"])
    yield f"{max(for_tail) / min(for_tail):.0f} times less"
    yield f"{max(for_decrease) / min(for_decrease):.1f} times as much as the cheapest"
    for rank in ("5", "11"):
        by_parameters = left_out[f"{rank}{tail.BY_PARAMETERS}"]
        yield f"{by_parameters:.3f} in the place of {left_out[rank]:.3f}"
    together = with_interval(gaps["5", "int6"], ".1f")
    yield f"gaps add up to {in_all:.1f}%; all kinds together lost {together}%"
    apart = []
    for rank in ("5", "11"):
        pairs = zip(gaps[rank, "float32"], gaps[rank, "int6"], strict=True)
        apart.append(with_interval([one - other for one, other in pairs], ".1f"))
    yield f"rank 5 in float32 ended {apart[0]} points above rank 5 in six bits"
    yield f"rank 11 {apart[1]} points above rank 11"


def of_one_rank():
    """Yields how many gaps of lower and of higher ranks were as foretold from another rank."""
    right = right_from_one_rank()
    lower, higher, by_width = (NUMBERS[sum(each)] for each in right.values())
    of_all = len(right["by width and tokens"])
    yield f"{lower} of {NUMBERS[len(right['lower'])]} lower ranks"
    yield f"{higher} of {NUMBERS[len(right['higher'])]} higher ranks"
    yield f"{by_width} of the {of_all}"


def right_from_one_rank():
    """Returns whether each gap was as foretold, of lower and higher ranks and by another law."""
    right = {"lower": [], "higher": [], "by width and tokens": []}
    known = {("convolutions", 4), ("encoder", 4)}  # before the prediction
    for measured, point, expected in from_one_rank(optimizers_runs(), read_runs(tail.OUT)):
        if point.rank != measured.rank and (point.name, point.rank) not in known:
            kind = "higher" if point.rank > measured.rank else "lower"
            right[kind].append(is_near(point.gap, expected))
            right["by width and tokens"].append(is_near(point.gap, point.guess))
    return right


def counts_from_one_rank():
    """Returns the number of right predictions, and of all."""
    right = right_from_one_rank()
    several = [*right["lower"], *right["higher"]]
    return sum(several), len(several)


def is_near(gap, expected):
    """Returns whether a gap lies within a quarter of its prediction, or within 0.2 points."""
    return abs(gap - expected) <= max(0.25 * expected, 0.2)


def within_a_quarter(gap, predicted):
    """Returns whether a gap lies within a quarter of its prediction; both are in per cent."""
    return abs(gap - predicted) <= 0.25 * predicted


@functools.cache
def results_of_strategies():
    """Returns the results of `benchmarks.convergence` by strategy."""
    return results(read_runs(RESULTS / "convergence.jsonl"), by_name)


def convergence_runs(name):
    """Returns the gaps of a strategy of `benchmarks.convergence`, in per cent."""
    several = results_of_strategies()
    return several[STRATEGIES[name]].gaps(several[EXACT])


def ended_lower(study, low, high):
    """Writes how many points lower the first of two settings with first steps ended, by seed.

    Each setting is (rank; 0 for ranks by spectrum, first steps, their rank; 0 if they are exact).
    """
    by_setting = made(study, optimizers_runs())
    exact = next(iter(by_setting.values()))
    gaps = {}
    for setting, result in by_setting.items():
        if setting.rank or setting.ratio:
            key = (setting.rank, setting.exact_steps, setting.first_rank)
            gaps[key] = dict(zip(sorted(result.losses), result.gaps(exact), strict=True))
    shared = gaps[low].keys() & gaps[high].keys()
    differences = [gaps[high][seed] - gaps[low][seed] for seed in sorted(shared)]
    return f"{mean(differences):z.1f} ± {half_width(differences):.1f} points"


def apart_on_two_processors():
    """Yields how far runs at width 64 that differ only in their processor ended from each other."""
    elsewhere, here = study("width 64"), made(settings.FIRST_STEPS[0], optimizers_runs())
    apart = []
    for setting in elsewhere.keys() & here.keys():
        for seed, loss in elsewhere[setting].losses.items():
            apart.append(100 * abs(loss / here[setting].losses[seed] - 1))
    yield f"ended {mean(apart):.2f}% apart on average on two processors, over {len(apart)} pairs"


def optimizers_runs():
    return read_runs(RESULTS / "optimizers.jsonl")


def choosing():
    for name, words in (
        ("adamw", "behind Adam and AdamW"),
        ("muon", "behind Muon, where the tail"),
    ):
        law = TAIL_LAWS[name]
        yield f"{law.c} * tail {law.power} per cent"
        yield words
    yield "{} of {} predictions that were made".format(*counts_from_one_rank())
    yield from list(of_one_rank())[:2]
    _, error = in_sample(optimizers_runs(), read_runs(tail.OUT))["adamw"]
    yield f"the formula misses the fitted gaps by {100 * error:.0f}%"
    yield f"{by_spectrum_at_512()[0]} points lower than rank 48"
    yield gap_of_ranks_later(settings.LATER[1])
    gaps, _ = rank_in(study("width 512"), 32)
    yield f"rank 32, which ended {with_interval(gaps, '.1f')}% above"
    six_bits = behind("adamw", "rank 16, int8", "rank 21, int6")
    yield f"ended {six_bits} points lower than eight bits"
    float32, int8 = by_spectrum()
    yield f"by {float32} points with the bytes of rank 4 and by {int8} with those of rank 16"
    for label, name in (("AdamW", "adamw"), ("Muon", "muon")):
        law = LAWS[name]
        yield f"| {label} | {law.a:.3g} | {law.k} | {law.runs} |"
    gaps, ratio = rank_in(study("width 512"), 48)
    above = f"{mean(gaps):.2f} ± {half_width(gaps):.2f}%"
    yield f"ended {above} (95%) above their exact runs at rank 48"
    yield f"{ratio:.0f} times fewer bytes than float32"
    yield f"{ratio / 2:.0f} times fewer than bfloat16"
    first = made(settings.FIRST_STEPS[0], optimizers_runs())
    exact = next(iter(first.values()))
    for (rank, steps), words in (
        ((11, 0), "rank 11 from the first step on ended {} above exact with {} times fewer bytes"),
        ((5, 48), "rank 5 after 10% exact steps ended {} above with {} times fewer"),
    ):
        for setting, result in first.items():
            if (setting.rank, setting.exact_steps, setting.first_rank) == (rank, steps, 0):
                above = with_interval(result.gaps(exact), ".1f") + "%"
                yield words.format(above, f"{exact.sent / result.sent:.1f}")


CLAIMS = {
    "docs/choosing.md": choosing,
    "README.md": readme,
    "docs/performance.md": performance,
    "docs/convergence.md": convergence,
}


@functools.cache
def claims_of(page):
    """Returns the sentences about the committed runs that the page must have."""
    return tuple(CLAIMS[page]())


def prose(page):
    """Returns the paragraphs of a page, without what a report writes and without programs."""
    text = (ROOT / page).read_text()
    text = re.sub(r"<!-- .*?-->\n.*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    paragraphs = []
    for section in re.split(r"\n(?=###? )", text):
        if COMMIT.search(section):  # the whole of it is of programs and runs that are there
            continue
        for part in re.split(r"\n\s*\n|\n(?=- )", section):
            paragraphs.append(" ".join(part.split()))
    return paragraphs


@pytest.mark.parametrize("page", PAGES)
def test_what_is_said_of_the_runs_is_theirs(page):
    whole = " ".join((ROOT / page).read_text().replace("**", "").split())
    missing = [claim for claim in claims_of(page) if claim not in whole]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_no_measured_number_is_without_its_source(page):
    untraced = []
    for paragraph in prose(page):
        if SOURCES.search(paragraph):
            continue
        rest = paragraph.replace("**", "")
        for text in (*claims_of(page), *STATED):
            rest = rest.replace(text, "")
        untraced += [
            f"{match[0]}: {rest[max(0, match.start() - 50) : match.end() + 20]}"
            for match in MEASURED.finditer(rest)
        ]
    assert not untraced, "\n".join(untraced)
