"""Makes the tables of the studies, and puts them into docs/convergence.md."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import jaxcomp
from benchmarks.common.paths import ROOT
from benchmarks.common.runs import Run, made_on
from benchmarks.common.tables import in_page, markdown, with_interval
from benchmarks.convergence.runs import Result, results
from benchmarks.convergence.training import AXIS, Config
from benchmarks.optimizers.settings import FIRST_STEPS, LATER, OTHERS, STUDIES, Setting, Study

PAGE = ROOT / "docs" / "convergence.md"
COMMAND = "python -m benchmarks.optimizers --report"
# How the first steps travel, all without a loss that could be seen.
_FIRST = {
    "float32": jaxcomp.allreduce(axis_name=AXIS),
    "bfloat16": jaxcomp.allreduce(axis_name=AXIS, comm_dtype="bfloat16"),
    "int8": jaxcomp.quantized_allreduce(axis_name=AXIS),
}


def made(study: Study, runs: Sequence[Run]) -> dict[Setting, Result]:
    """Returns the best exact average, then the compressed settings; none before the search ends.

    Args:
      study: The study.
      runs: The runs of `benchmarks.optimizers`.
    """
    by_setting = results(_of(study, runs), Setting)
    try:
        exact = study.exact(lambda setting, seed: by_setting[setting].losses[seed])
    except KeyError:
        return {}
    several = (exact, *study.compressed(exact))
    return {setting: by_setting[setting] for setting in several if setting in by_setting}


def _of(study: Study, runs: Sequence[Run]) -> list[Run]:
    """Returns the finished runs of a study: those with its settings and seeds."""
    settings = set()
    for rate, momentum in study.rates:
        exact = Setting(study.optimizer, rate, momentum)
        settings.update((exact, *study.compressed(exact)))
    several = []
    for run in runs:
        same = Config(**run["config"]) == study.config and run["seed"] < study.seeds
        if same and Setting(**run["setting"]) in settings:
            several.append(run)
    return several


def paged(page: str, runs: Sequence[Run]) -> str:
    """Returns the page with the table of all studies, and that of the first steps.

    Raises:
      ValueError: No search is complete, or the page has no place for the table.
    """
    page = in_page(page, COMMAND, f"{compared((*STUDIES, *OTHERS), runs)}\n")
    page = in_page(page, f"{COMMAND}, ranks later", f"{compared(LATER, runs)}\n")
    for study in FIRST_STEPS:
        page = in_page(page, f"{COMMAND}, {study.name}", f"{first_steps(study, runs)}\n")
    return page


def compared(studies: Sequence[Study], runs: Sequence[Run]) -> str:
    """Returns the table of several studies.

    Raises:
      ValueError: No search is complete.
    """
    rows = []
    sources: list[Run] = []
    for study in studies:
        sources += _of(study, runs)
        by_setting = made(study, runs)
        for setting, result in by_setting.items():
            exact = next(iter(by_setting.values()))
            label = setting.sent
            above = with_interval(result.gaps(exact), "+.1f", "%")
            if result is exact:
                label = ", ".join(filter(None, (f"**{setting.label}**", study.name)))
                above = f"loss {mean(result.losses.values()):.3f}"
            rows.append([label, str(len(result.losses)), above, f"{exact.sent / result.sent:.1f}x"])
    if not rows:
        raise ValueError("no search has come to its end; run python -m benchmarks.optimizers.")
    table = markdown(["sent", "seeds", "above exact (95%)", "fewer bytes"], rows)
    return f"{table}\n\n{made_on(sources)}"


def first_steps(study: Study, runs: Sequence[Run]) -> str:
    """Returns the table of runs with exact first steps, for several wire dtypes of these steps."""
    config = study.config
    first = []
    header = ["sent", "seeds", "above exact (95%)"]
    for name, reducer in _FIRST.items():
        header.append(f"fewer bytes, first in {name}")
        first.append(reducer.bytes(config.params(), replicas=config.replicas).bytes_after)
    exact, *several = made(study, runs).items()
    rows = []
    for setting, result in several:
        row = [setting.sent, str(len(result.losses))]
        row.append(with_interval(result.gaps(exact[1]), "+.1f", "%"))
        for sent in first:
            in_exact_steps = setting.exact_steps - setting.steps_before
            whole = result.sent + in_exact_steps * (sent - first[0])
            row.append(f"{exact[1].sent / whole:.1f}x")
        rows.append(row)
    return f"{markdown(header, rows)}\n\n{made_on(_of(study, runs))}"
