"""The two errors for a checkpoint: one that does not fit, and one that is not safe to read.

All other files raise these, so that a caller has two classes to catch. A mismatch is collected
before it is raised: one error lists every leaf that is missing, unexpected or of another shape,
because mending one at a time takes as many runs. What a file says is never trusted in a message
either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch_bridge._base.terminal import printable

_LISTS = ("missing", "unexpected", "mis_shaped", "ambiguous")


class CheckpointMismatch(ValueError):
    """Reports that a checkpoint does not fit the model, the state, or the file format.

    One error lists all differences. Names come from files, so the text shows control characters as
    escapes, which a terminal does not execute.

    Args:
      message: One sentence that says what does not fit, and ends with the way to mend it.
      missing: Leaves that the target needs and the source does not have.
      unexpected: Leaves of the source that have no place in the target.
      mis_shaped: Leaves that correspond but whose shapes differ, each a line of text.
      ambiguous: Leaves with more than one candidate, each a line of text.
      parameters: Names of the arguments with which the caller can solve the problem; the command
        line shows its options of these names.

    Attributes:
      missing: The argument as a tuple, like ``unexpected``, ``mis_shaped``, ``ambiguous`` and
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
        for name in _LISTS:
            entries = getattr(self, name)
            if entries:
                lines.append(f"  {name.replace('_', '-')} ({len(entries)}):")
                lines += [f"    {printable(entry)}" for entry in entries]
        super().__init__("\n".join(lines))

    @classmethod
    def joined(cls, errors: Sequence[tuple[str, ValueError]]) -> CheckpointMismatch:
        """Makes one error of several, whose text numbers them; its lists are those of all.

        Args:
          errors: For each the part of the file that it is about, and the error.

        Example:
          >>> lacking = CheckpointMismatch("A name is missing.", missing=["fc"])
          >>> errors = [("the model", lacking), ("the optimizer", ValueError("No rate."))]
          >>> print(CheckpointMismatch.joined(errors))
          There are 2 problems:
          1. the model: A name is missing.
               missing (1):
                 fc
          2. the optimizer: No rate.
        """
        lines = [f"There are {len(errors)} problems:"]
        for number, (kind, error) in enumerate(errors, 1):
            lines.append(f"{number}. {kind}: " + str(error).replace("\n", "\n   "))
        whole = cls("\n".join(lines))
        for name in (*_LISTS, "parameters"):
            entries = []
            for _, error in errors:
                entries += getattr(error, name, ())
            setattr(whole, name, tuple(dict.fromkeys(entries)))
        return whole


class Problems:
    """Collects the errors of independent checks, to raise them as one.

    Attributes:
      errors: For each error the part of the file that it is about, and the error.

    Example:
      >>> problems = Problems()
      >>> with problems.about("the model"):
      ...     raise CheckpointMismatch("Names differ.")
      >>> problems.errors
      [('the model', CheckpointMismatch('Names differ.'))]
    """

    def __init__(self) -> None:
        self.errors: list[tuple[str, ValueError]] = []

    @contextlib.contextmanager
    def about(self, kind: str) -> Iterator[None]:
        """Catches a ValueError of the block and keeps it; each text is kept once."""
        try:
            yield
        except ValueError as error:
            if str(error) not in [str(other) for _, other in self.errors]:
                self.errors.append((kind, error))

    def raise_all(self) -> None:
        """Raises what was collected: nothing, the only error, or one `CheckpointMismatch`."""
        if len(self.errors) == 1:
            raise self.errors[0][1]
        if self.errors:
            raise CheckpointMismatch.joined(self.errors)


class UnsafeCheckpoint(ValueError):
    """Reports that a file asks for a global that is not on the allow-list; nothing was executed.

    The message names the first such global.

    Example:
      >>> isinstance(UnsafeCheckpoint("run.pt asks for os.system"), ValueError)
      True
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))
