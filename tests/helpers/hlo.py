"""The collectives of a compiled program, read apart from `jaxcomp.collectives`: its oracle.

What stands in loops and branches, which takes a reader of whole programs, is the library's.
"""

import math
import re
import types

import jax

import jaxcomp

BYTES = {"f32": 4, "u32": 4, "f16": 2, "bf16": 2, "s8": 1, "u8": 1, "pred": 1}
Sent = tuple[str, str, int]
_LINE = re.compile(
    r" = (.*) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(.*channel_id"
)


def text(function, *arguments):
    """The program of a function, which may be jitted; see test_reducer_bytes.py for a user's."""
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    return jitted.lower(*arguments).compile().as_text()


def collectives(compiled):
    """(operation, element type, number of values) of every result of every collective."""
    return [
        (found[2], dtype, math.prod(int(n) for n in dims.split(",") if n))
        for found in _LINE.finditer(compiled)
        for dtype, dims in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", found[1])
    ]


def read(compiled, mesh=None):
    """What `jaxcomp.collectives` finds in the text of a program."""
    mesh = mesh or jax.sharding.AbstractMesh((8,), ("devices",))
    return jaxcomp.collectives(types.SimpleNamespace(as_text=lambda: compiled), mesh=mesh)


def results(found):
    return [(found.kind, dtype, values) for dtype, values in found.arrays]


def sent_bytes(found):
    return sum(BYTES[dtype] * values for _, dtype, values in found)
