"""Every wing imports only from itself and from those above it."""

import pytest

from tests.helpers.paths import ROOT, imports

# In reading order. A module beside the wings (`__main__`) may import from all of them.
WINGS = {
    "jaxcomp": (
        *("_base", "_mesh", "_lowrank", "_reducers", "_states", "_training"),
        *("_local", "_bytes", "_adviser", "_wire"),
    ),
    "torch_bridge": ("_base", "_read", "_pairing", "_hook", "_job", "_convert", "_cli"),
}


@pytest.mark.parametrize("package", WINGS)
def test_every_wing_imports_only_downwards(package):
    wings = WINGS[package]
    assert {p.parent.name for p in (ROOT / package).glob("*/__init__.py")} == set(wings)
    upwards = []
    for place, wing in enumerate(wings):
        allowed = wings[: place + 1]
        for file in (ROOT / package / wing).glob("*.py"):
            for module in imports(file.read_text()):
                names = module.split(".")
                inside = names[0] == package
                if inside and (len(names) == 1 or names[1] not in allowed):
                    upwards.append(f"{file.relative_to(ROOT)} imports {module}")
    assert not upwards
