"""Every wing imports only from itself and from those above it."""

import ast

import pytest
from paths import ROOT

# In reading order. A module beside the wings (`__main__`) may import from all of them.
WINGS = {
    "jaxcomp": (
        *("_base", "_mesh", "_lowrank", "_reducers", "_states", "_training"),
        *("_local", "_bytes", "_adviser", "_wire"),
    ),
    "torch_bridge": ("_base", "_read", "_pairing", "_hook", "_job", "_convert", "_cli"),
}


def imports(file):
    """Modules that a file imports, also inside of functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("package", WINGS)
def test_every_wing_imports_only_downwards(package):
    wings = WINGS[package]
    assert {p.parent.name for p in (ROOT / package).glob("*/__init__.py")} == set(wings)
    upwards = [
        f"{file.relative_to(ROOT)} imports {module}"
        for place, wing in enumerate(wings)
        for file in (ROOT / package / wing).glob("*.py")
        for module in imports(file)
        if module.split(".")[0] == package
        and module.split(".")[1:2] not in [[w] for w in wings[: place + 1]]
    ]
    assert not upwards


def test_no_module_imports_itself_in_a_circle():
    for package in WINGS:
        files = {
            ".".join(f.relative_to(ROOT).with_suffix("").parts): f
            for f in (ROOT / package).glob("*/*.py")
        }
        beneath = {name: [m for m in imports(file) if m in files] for name, file in files.items()}
        while free := [name for name, needs in beneath.items() if not set(needs) & set(beneath)]:
            for name in free:
                del beneath[name]
        assert not beneath
