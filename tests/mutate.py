"""Finds out whether tests notice when a module is wrong: makes mutations, and runs its tests.

    python -m tests.mutate jaxcomp/_reducers torch_bridge/_read --count 20

A mutation changes one place: a comparison, a constant, a sign, a condition, a statement that is
dropped, an `and` that becomes an `or`. It is made in a copy of the repository. Mutations that no
test notices are listed with their line: a test is missing, or the change makes no difference.
"""

import argparse
import ast
import collections
import functools
import itertools
import operator
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.paths import ROOT

LEFT_OUT = (".*", "out", "__pycache__", "*.png")
OPPOSITES = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.USub: ast.UAdd,
}
# The tests of a wing, where they do not lie in a folder of its name.
TESTS = {
    "jaxcomp/__main__.py": ["tests/jaxcomp/adviser"],
    "jaxcomp/_bytes": [
        *("tests/jaxcomp/bytes", "tests/jaxcomp/adviser", "tests/benchmarks/test_optimizers.py"),
    ],
    "jaxcomp/_base": ["tests/jaxcomp/reducers", "tests/jaxcomp/bytes"],
    "jaxcomp/_local": ["tests/jaxcomp/local", "tests/jaxcomp/reducers/test_errors.py"],
    "jaxcomp/_lowrank": ["tests/jaxcomp/lowrank", "tests/jaxcomp/reducers", "tests/jaxcomp/bytes"],
    "jaxcomp/_mesh": ["tests/jaxcomp/mesh", "tests/jaxcomp/reducers"],
    "jaxcomp/_states": ["tests/jaxcomp/states", "tests/jaxcomp/training/test_misuse.py"],
    "torch_bridge/__main__.py": ["tests/torch_bridge/test_cli.py", "tests/test_without_torch.py"],
    "torch_bridge/_base": ["tests/torch_bridge", "tests/fuzz", "tests/test_without_torch.py"],
    "torch_bridge/_read": [
        *("tests/torch_bridge/test_load.py", "tests/torch_bridge/test_refused.py"),
        "tests/fuzz/test_fuzz.py::test_what_torch_writes_is_read_as_torch_reads_it_or_refused",
    ],
    "torch_bridge/_cli": ["tests/torch_bridge/test_cli.py", "tests/torch_bridge/test_cli_files.py"],
    "torch_bridge/_job": [
        *("tests/torch_bridge/test_layout.py", "tests/torch_bridge/test_powersgd_state.py"),
        *("tests/torch_bridge/test_units.py", "tests/torch_bridge/test_frameworks.py"),
        *("tests/torch_bridge/test_verbs.py", "tests/torch_bridge/test_calls.py"),
    ],
}
PYTEST = ["-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]


def deciding(node):
    """Yields a syntax tree's nodes, without those that decide nothing about what a program does.

    They are the texts of errors, annotations, decorators such as `dataclass(frozen=True)`, imports
    for type checkers, and arguments that only guard or point (`strict=True`, `stacklevel=2`).
    """
    yield node
    if isinstance(node, ast.Raise):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            match child:
                case ast.keyword(arg="strict" | "stacklevel"):
                    continue
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    continue
                case ast.AST():
                    yield from deciding(child)


def changes(tree):
    """Yields for every change of a syntax tree its line, its kind, and what makes it in place."""
    for node in deciding(tree):
        change = None
        match node:
            case ast.Compare(ops=[sign, *_]) if type(sign) in OPPOSITES:
                change = functools.partial(operator.setitem, node.ops, 0, OPPOSITES[type(sign)]())
            case ast.BinOp(op=sign) | ast.BoolOp(op=sign) | ast.UnaryOp(op=sign):
                if type(sign) in OPPOSITES:
                    change = functools.partial(setattr, node, "op", OPPOSITES[type(sign)]())
            case ast.Constant(value=bool() as value):
                change = functools.partial(setattr, node, "value", not value)
            case ast.Constant(value=int() | float() as value):
                # One more than a thousand rarely makes a difference.
                larger = value + 1 if value < 100 else 2 * value
                change = functools.partial(setattr, node, "value", larger)
            case ast.If(test=test) | ast.IfExp(test=test):
                negated = ast.UnaryOp(ast.Not(), test)
                change = functools.partial(setattr, node, "test", negated)
        if change:
            yield node.lineno, type(node).__name__, change
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if not isinstance(statements, list):
                continue  # an expression has its branches under the same names
            for place, statement in enumerate(statements):
                match statement:
                    case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
                        drop = functools.partial(operator.setitem, statements, place, ast.Pass())
                        yield statement.lineno, f"{type(statement).__name__} dropped", drop


def drawn(folders, count, seed):
    """Draws mutations, from each wing in proportion to its size.

    Returns for each its file, and its number among the changes of the file.
    """
    by_wing = collections.defaultdict(list)
    for folder in folders:
        place = ROOT / folder
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            file = path.relative_to(ROOT)
            for number, _ in enumerate(changes(ast.parse(path.read_text()))):
                by_wing[wing_of(file)].append((file, number))
    generator = random.Random(seed)
    turns = []
    for mutations in by_wing.values():
        generator.shuffle(mutations)
        first = generator.random()
        for place, mutation in enumerate(mutations):
            turns.append(((place + first) / len(mutations), *mutation))
    turns.sort()
    return [(file, number) for _, file, number in turns[:count]]


def wing_of(file):
    """Returns the part of the repository that a file is counted with."""
    return "/".join(file.parts[:2])


def tests_of(file):
    """Returns the tests of a module, as arguments of pytest."""
    package, wing = file.parts[:2]
    folder = f"tests/{package}/{wing.removeprefix('_')}"
    default = [folder] if (ROOT / folder).is_dir() else [f"tests/{package}"]
    return TESTS.get(wing_of(file), default)


def noticed(repository, file, number, seconds):
    """Makes a mutation; returns whether a test fails or hangs, the line and the kind."""
    path = repository / file
    source = path.read_text()
    tree = ast.parse(source)
    line, kind, change = next(itertools.islice(changes(tree), number, None))
    change()
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    command = [sys.executable, *PYTEST, *tests_of(file)]
    # Processes that tests start must import the mutated copy, not an installed package.
    environment = os.environ | {"PYTHONPATH": str(repository)}
    try:
        done = subprocess.run(
            command, cwd=repository, env=environment, capture_output=True, timeout=seconds
        )
        return done.returncode != 0, line, kind
    except subprocess.TimeoutExpired:
        return True, line, kind
    finally:
        path.write_text(source)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", default=["jaxcomp", "torch_bridge"])
    parser.add_argument("--count", type=int, default=100, help="mutations, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=900, help="for the tests of one")
    options = parser.parse_args()
    made = collections.Counter()
    caught = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        shutil.copytree(ROOT, repository, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for file, number in drawn(options.folders, options.count, options.seed):
            seen, line, kind = noticed(repository, file, number, options.seconds)
            made[wing_of(file)] += 1
            caught[wing_of(file)] += seen
            print(f"{'noticed' if seen else 'SURVIVED'}: {file}:{line} {kind}", flush=True)
    print("\n| module | mutations | noticed |\n|---|--:|--:|")
    for wing in sorted(made):
        print(f"| {wing} | {made[wing]} | {caught[wing]} |")
    print(f"| together | {made.total()} | {caught.total()} |")


if __name__ == "__main__":
    main()
