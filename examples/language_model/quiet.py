"""Keeps orbax and tensorstore from printing stack traces beside the errors that they raise.

Whoever catches the error says it in one sentence. When a leaf cannot be read or written, orbax
gives up and closes its event loop, and the answers for the other leaves arrive there too late.
"""

from __future__ import annotations

import logging
import sys

_LATE = ("Event loop is closed", "exception was never retrieved", "was destroyed but it is pending")


def orbax() -> None:
    """From now on; what others log or raise is shown as before."""
    logging.getLogger("absl").addFilter(_news)
    logging.getLogger("asyncio").addFilter(_news)
    shown = sys.unraisablehook

    def hook(raised: sys.UnraisableHookArgs) -> None:
        if not str(raised.exc_value).startswith(_LATE):
            shown(raised)

    sys.unraisablehook = hook


def _news(record: logging.LogRecord) -> bool:
    said = record.getMessage()
    if record.name == "asyncio":
        return not any(late in said for late in _LATE)
    # It warns with every checkpoint that there is nothing to merge, as never is without OCDBT.
    return not record.exc_info and "Skipping merge of OCDBT" not in said
