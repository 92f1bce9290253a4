"""Whether the tests of a module notice when it is wrong: makes mutations, and runs its tests.

    python -m tests.mutate jaxcomp/_reducers torch_bridge/_read --count 20

A mutation changes one place: a comparison, a constant, a sign, a condition, a statement that is
dropped, an `and` that becomes an `or`. It is made in a copy of the repository. Those that no test
notices are listed with their line: a test is missing, or the change makes no difference.
"""

import argparse
import ast
import collections
import copy
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.helpers.paths import ROOT

COPIED = ("jaxcomp", "torch_bridge", "tests", "examples", "docs", "benchmarks")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
COMPARISONS = {
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
}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
# The tests of a wing, where they do not lie in a folder of its name.
TESTS = {
    "jaxcomp/_base": ["tests/jaxcomp/reducers", "tests/jaxcomp/bytes"],
    "torch_bridge/_base": ["tests/torch_bridge", "tests/fuzz"],
    "torch_bridge/_read": ["tests/torch_bridge/test_load.py", "tests/torch_bridge/test_refused.py"],
    "torch_bridge/_cli": ["tests/torch_bridge/test_cli.py", "tests/torch_bridge/test_cli_files.py"],
}


class Mutation(NamedTuple):
    """One changed place; `apply` changes the node of that number in a tree."""

    path: Path
    line: int
    number: int  # of the node, as `ast.walk` counts
    kind: str


def kinds_of(node):
    """Yields in which ways a node can be changed."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield "comparison"
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield "operator"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield "sign"
    elif isinstance(node, ast.BoolOp):
        yield "and, or"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        yield "constant"
    elif isinstance(node, ast.If | ast.IfExp):
        yield "branches"
    elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or isinstance(
        node, ast.AugAssign | ast.Raise
    ):
        yield "dropped"


def mutations_of(path):
    """Returns all mutations of a file, outside of annotations and calls of nothing but types."""
    tree = ast.parse(path.read_text())
    mutations = []
    for number, node in enumerate(ast.walk(tree)):
        for kind in kinds_of(node):
            mutations.append(Mutation(path.relative_to(ROOT), node.lineno, number, kind))
    return mutations


def changed(node, kind):
    """Returns what stands in the place of a node; None for nothing."""
    new = copy.copy(node)
    if kind == "comparison":
        new.ops = [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
    elif kind == "operator":
        new.op = OPERATORS[type(node.op)]()
    elif kind == "sign":
        return node.operand
    elif kind == "and, or":
        new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif kind == "constant":
        new.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif kind == "branches":
        new.test = ast.UnaryOp(ast.Not(), node.test)
    else:
        return ast.Pass()
    return new


class Applied(ast.NodeTransformer):
    """Replaces one node of a tree."""

    def __init__(self, node, kind):
        self.node = node
        self.kind = kind

    def visit(self, node):
        if node is self.node:
            return changed(node, self.kind)
        return self.generic_visit(node)


def mutated(source, mutation):
    """Returns the source of a file with one place changed."""
    tree = ast.parse(source)
    node = next(node for k, node in enumerate(ast.walk(tree)) if k == mutation.number)
    return ast.unparse(ast.fix_missing_locations(Applied(node, mutation.kind).visit(tree)))


def tests_of(path):
    """Returns the tests of a module, as arguments of pytest."""
    package, wing = path.parts[0], path.parts[1]
    named = TESTS.get(f"{package}/{wing}")
    if named:
        return named
    folder = Path("tests") / package / wing.removeprefix("_")
    if (ROOT / folder).is_dir():
        return [str(folder)]
    return [f"tests/{package}"]


def copied(folder):
    """Copies what the tests need, and returns the copy."""
    target = Path(folder) / "repository"
    for name in COPIED:
        ignored = shutil.ignore_patterns("__pycache__", "*.png")
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, target / name)
    return target


def survives(mutation, repository, seconds):
    """Returns whether all tests of the module pass with the mutation; what hangs is noticed."""
    path = repository / mutation.path
    source = path.read_text()
    path.write_text(mutated(source, mutation))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
    ]
    command += tests_of(mutation.path)
    try:
        done = subprocess.run(command, cwd=repository, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(source)
    return done.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", default=["jaxcomp", "torch_bridge"])
    parser.add_argument("--count", type=int, default=100, help="mutations, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=900, help="for the tests of one")
    options = parser.parse_args()
    mutations = []
    for folder in options.folders:
        place = ROOT / folder
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            mutations += mutations_of(path)
    chosen = random.Random(options.seed).sample(mutations, min(options.count, len(mutations)))
    made = collections.Counter()
    noticed = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        repository = copied(folder)
        for mutation in chosen:
            wing = "/".join(mutation.path.parts[:2])
            made[wing] += 1
            left = survives(mutation, repository, options.seconds)
            noticed[wing] += not left
            verdict = "SURVIVED" if left else "noticed"
            print(f"{verdict}: {mutation.path}:{mutation.line} {mutation.kind}", flush=True)
    print("\n| module | mutations | noticed |\n|---|--:|--:|")
    for wing in sorted(made):
        print(f"| {wing} | {made[wing]} | {noticed[wing]} |")
    print(f"| together | {made.total()} | {noticed.total()} |")


if __name__ == "__main__":
    main()
