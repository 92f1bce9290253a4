"""Which devices a collective in a compiled program joins: the forms in which XLA writes groups."""

from __future__ import annotations

import math
import re

import numpy as np

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_RANGE = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{('[^':]*'(?:,'[^':]*')*)\}(?=, [a-z]|$)")


def replica_groups(line: str) -> list[list[int]]:
    """The groups of devices that one collective joins, by number.

    Args:
      line: Of a compiled program as text (``compiled.as_text()``), with ``replica_groups`` as a
        list, ``{{0,4},{1,5}}``; as a range that is reshaped and turned, ``[2,2]<=[2,2]T(1,0)``; or
        as axes of a mesh, ``mesh['slow'=2,'fast'=4] {'slow'}``. Pairs of a permutation count too.

    Raises:
      ValueError: If they are in another form.
    """
    if found := _LISTED.search(line):
        return [_numbers(group) for group in re.findall(r"\{([\d, ]*)\}", found[1])]
    if found := _RANGE.search(line):
        groups, dims, turned = (_numbers(part or "") for part in found.groups())
        devices = np.arange(math.prod(dims)).reshape(dims)
        return np.transpose(devices, turned or None).reshape(groups).tolist()
    if found := _MESH.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", found[1])}
        joined = [list(sizes).index(name) for name in re.findall(r"'([^']*)'", found[2])]
        devices = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
        groups = np.moveaxis(devices, joined, range(-len(joined), 0))
        return groups.reshape(-1, math.prod(devices.shape[axis] for axis in joined)).tolist()
    raise ValueError(f"XLA writes replica groups in a form unknown here: {line.strip()}")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]
