"""Paths of the repository and of its results."""

from __future__ import annotations

from pathlib import Path

# Child processes start here, so that they find `benchmarks` as their parent did.
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LANGUAGE_MODEL = ROOT / "examples" / "language_model"
