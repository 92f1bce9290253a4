"""Programs in XLA's own text, read by XLA: groups of devices, types, loops and branches."""

from pathlib import Path

import jax
import pytest

import jaxcomp
from jaxcomp._wire.program import read_message
from tests.helpers import hlo
from tests.helpers.tables import rows

SMALL = jax.sharding.AbstractMesh((2, 2), ("x", "y"))
LARGE = jax.sharding.AbstractMesh((2, 2, 2), ("a", "b", "c"))
MESHES = {"xy": SMALL, "abc": LARGE}
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""


def module(*computations):
    return "\n\n".join(["HloModule m", ADD, *computations])


def of_line(line, mesh, shape="f32[8]"):
    """Returns the one collective of a program that is a single line."""
    lines = [
        f"ENTRY %main (p: {shape}) -> {shape} {{",
        f"  %p = {shape} parameter(0)",
        f"  ROOT %r = {line}",
        "}",
    ]
    (collective,) = hlo.read(module("\n".join(lines)), mesh)
    return collective


# A form, the axes of the mesh, and those that it is about. An axis of four is one of two and one of
# two more, before or behind; T(1,0) puts the devices 0 2 1 3 in a row.
FORMS = rows("""
replica_groups={{0,4},{1,5},{2,6},{3,7}} | abc | a
replica_groups=[2,2]<=[2,2]T(1,0) | xy | x
replica_groups=[2,2]<=[4] | xy | y
replica_groups=[4,1]<=[4] | xy |
replica_groups=mesh['slow'=2,'fast'=2] {'slow'} | xy | x
replica_groups=mesh['slow'=2,'fast'=2] {'fast'} | xy | y
replica_groups=mesh['s'=2,'t'=2,'u'=2] {'s','u'} | abc | ac
replica_groups=mesh['s'=2,'t'=2], device_ids=([2,2]T(1,0)) {'s'} | xy | y
replica_groups=mesh['s'=2,'t'=4] {'t':(1)2} | abc | b
replica_groups=mesh['s'=2,'t'=4] {'t':(2)2} | abc | c
replica_groups={} | xy | xy
replica_groups={} | abc | abc
""")


@pytest.mark.parametrize(("form", "mesh", "axes"), FORMS)
def test_replica_groups_are_read_in_every_form(form, mesh, axes):
    line = f"f32[8] all-reduce(%p), channel_id=1, {form}, use_global_device_ids=true, to_apply=%add"
    assert of_line(line, MESHES[mesh]).axes == tuple(axes)


def test_the_pairs_of_a_permutation_are_read():
    line = "f32[8] collective-permute(%p), channel_id=1, source_target_pairs={{0,1},{1,0}}"
    assert of_line(line, LARGE).axes == ("c",)
    line = "f32[8] collective-permute(%p), channel_id=1, source_target_pairs={{0,4},{3,1}}"
    assert of_line(line, LARGE).axes == ("a", "b")


# A shape, its type, and the number of values and of bytes.
TYPES = rows("""
pred[8] | pred | 8 | 8
s8[3,5] | s8 | 15 | 15
bf16[3,5] | bf16 | 15 | 30
f16[7] | f16 | 7 | 14
f64[] | f64 | 1 | 8
c64[2] | c64 | 2 | 16
s4[7] | s4 | 7 | 4
f8e4m3fn[6] | f8e4m3fn | 6 | 6
f8e8m0fnu[6] | f8e8m0fnu | 6 | 6
f4e2m1fn[5] | f4e2m1fn | 5 | 3
u1[9] | u1 | 9 | 2
c128[2] | c128 | 2 | 32
u64[3] | u64 | 3 | 24
f32[0,4] | f32 | 0 | 0
""")


@pytest.mark.parametrize(("shape", "element", "values", "size"), TYPES)
def test_element_types_and_their_bytes(shape, element, values, size):
    line = f"{shape} collective-permute(%p), channel_id=1, source_target_pairs={{{{0,1}}}}"
    collective = of_line(line, SMALL, shape)
    assert collective.arrays == ((element, int(values)),)
    assert collective.bytes == int(size)


def test_what_is_not_known_is_refused():
    unknown_groups = b"\x12\x0aall-reduce\x1a\x02\x10\x0b"
    unknown_element = b"\x12\x03add\x1a\x02\x10\x63"
    for line, message in ((unknown_groups, "in an unknown form"), (unknown_element, "type 99")):
        instruction = b"\x12" + bytes([len(line)]) + line
        computation = b"\x1a" + bytes([len(instruction)]) + instruction
        with pytest.raises(ValueError, match=message):
            read_message(computation)
    with pytest.raises(ValueError, match=r"got str\. Pass jax\.jit\(step\)\.lower"):
        jaxcomp.collectives("HloModule m")


PROGRAM = (Path(__file__).parent / "data" / "loops.hlo").read_text()


def test_bytes_of_asynchronous_collectives_and_where_they_run():
    listed = hlo.read(PROGRAM)
    assert [(x.kind, x.times, x.in_loop, x.in_branch) for x in listed] == [
        ("all-reduce", 3, True, False),
        ("all-gather", 1, False, True),
        ("all-reduce", 1, False, False),
        ("reduce-scatter", 1, False, False),
    ]
    assert [x.bytes for x in listed] == [32] * 4
    assert [x.arrays for x in listed[:3]] == [(("f32", 8),)] * 3
    assert listed[2].operation == "f/psum"
    words = "all-reduce of 32 bytes of f32 over ('devices',), in a loop (3 times)"
    assert str(listed[0]) == words
    assert str(listed[1]) == "all-gather of 32 bytes of f32 over ('devices',), in one branch"


def test_results_of_one_collective_with_several():
    lines = [
        "ENTRY %main (p: f32[8], q: bf16[2,3]) -> f32[8] {",
        "  %p = f32[8] parameter(0)",
        "  %q = bf16[2,3] parameter(1)",
        "  %r = (f32[8], bf16[2,3]) all-to-all(%p, %q), channel_id=1, replica_groups={{0,1}}",
        "  ROOT %x = f32[8] get-tuple-element(%r), index=0",
        "}",
    ]
    (collective,) = hlo.read(module("\n".join(lines)))
    assert collective.arrays == (("f32", 8), ("bf16", 6))
    assert collective.bytes == 44
    assert collective.as_all_reduce == 22
    assert "of f32+bf16 over" in str(collective)
