"""Reads the collectives of a compiled program without `jaxcomp.collectives`, as its oracle.

It does not count the turns of loops and branches, for which the tests use the library.
"""

import math
import re

import jax
from jaxlib import _hlo

from jaxcomp._wire.collectives import collectives_of
from jaxcomp._wire.program import read_message

BYTES = {"f32": 4, "u32": 4, "f16": 2, "bf16": 2, "s8": 1, "u8": 1, "pred": 1}
_ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")
_LINE = re.compile(
    r" = (.*) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(.*channel_id"
)


def program(function, *arguments):
    """Compiles a function, which may be jitted; see test_reducer_bytes.py for a user's program."""
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    return jitted.lower(*arguments).compile()


def text(function, *arguments):
    """Returns the text of a compiled function."""
    return program(function, *arguments).as_text()


def collectives(compiled):
    """Lists (operation, element type, number of values) of all results of all collectives."""
    results = []
    for line in _LINE.finditer(compiled):
        shapes, operation = line.groups()
        for element, dims in _ARRAY.findall(shapes):
            values = math.prod(int(dim) for dim in dims.split(",") if dim)
            results.append((operation, element, values))
    return results


def read(compiled, mesh=None):
    """Lists the collectives that the library finds in a program's text, read with XLA's parser.

    The parser does not accept every text that XLA writes; `jaxcomp.collectives` needs no text.
    """
    mesh = mesh or jax.sharding.AbstractMesh((8,), ("devices",))
    message = _hlo.hlo_module_from_text(compiled).as_serialized_hlo_module_proto()
    return collectives_of(read_message(message), lambda: mesh)


def results(collective):
    """Lists the results of one collective of the library, in the form of `collectives`."""
    return [(collective.kind, element, values) for element, values in collective.arrays]


def sent_bytes(listed):
    """Returns the sum of the bytes of all results that `collectives` lists."""
    return sum(BYTES[element] * values for _, element, values in listed)
