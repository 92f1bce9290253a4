"""The language model of the examples, which the benchmarks train as well."""

from __future__ import annotations

import sys

from benchmarks.common.paths import LANGUAGE_MODEL

sys.path.insert(0, str(LANGUAGE_MODEL))
import lm

__all__ = ["lm"]
