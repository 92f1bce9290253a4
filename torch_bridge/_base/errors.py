"""The two errors that a checkpoint can cause: it does not fit, or it is not safe to read."""

from __future__ import annotations

from collections.abc import Sequence

from torch_bridge._base.terminal import printable


class CheckpointMismatch(ValueError):
    """A checkpoint does not fit the model, the state or the file format it is read as.

    Every difference is collected first and reported in this one error. Names come from files, so
    its text has everything written out that a terminal would act on.

    Args:
      message: What was being matched, as one sentence that ends with the way out.
      missing: Leaves that are wanted and that the source does not have.
      unexpected: Leaves of the source that have no place in the target.
      mis_shaped: Leaves that correspond but whose shapes differ, each a line of text.
      ambiguous: Leaves with more than one candidate, each a line of text.
      parameters: Names of the arguments with which the caller can decide otherwise; the command
        line shows its options of these names.

    Attributes:
      missing: As given, as a tuple; likewise ``unexpected``, ``mis_shaped``, ``ambiguous`` and
        ``parameters``.

    Example:
      >>> print(CheckpointMismatch("Names differ.", missing=["fc/kernel"]))
      Names differ.
        missing (1):
          fc/kernel
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mis_shaped: Sequence[str] = (),
        ambiguous: Sequence[str] = (),
        parameters: Sequence[str] = (),
    ) -> None:
        self.message = message
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mis_shaped = tuple(mis_shaped)
        self.ambiguous = tuple(ambiguous)
        self.parameters = tuple(parameters)
        lines = [printable(message, keep="\n")]
        for title, entries in (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("mis-shaped", self.mis_shaped),
            ("ambiguous", self.ambiguous),
        ):
            if entries:
                lines.append(f"  {title} ({len(entries)}):")
                lines += [f"    {printable(entry)}" for entry in entries]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the parts, so that the error survives a process pool."""
        state = {
            "message": self.message,
            "missing": self.missing,
            "unexpected": self.unexpected,
            "mis_shaped": self.mis_shaped,
            "ambiguous": self.ambiguous,
            "parameters": self.parameters,
        }
        return _rebuild_mismatch, (state,)


def _rebuild_mismatch(state: dict) -> CheckpointMismatch:
    return CheckpointMismatch(**state)


class UnsafeCheckpoint(ValueError):
    """A file asks for a global that is not on the allow-list; nothing of it was executed.

    The message names the first such global.

    Example:
      >>> isinstance(UnsafeCheckpoint("run.pt asks for os.system"), ValueError)
      True
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))
