"""What is published: the sdist runs its own tests, the wheel holds both packages and commands."""

import os
import pathlib
import subprocess
import sys
import tarfile
import zipfile

import pytest

import jaxcomp

ROOT = pathlib.Path(__file__).parents[1]
SHIPPED = ("jaxcomp", "torch_bridge", "tests", "examples", "docs", "benchmarks")
SAMPLE = (
    "tests/test_wings.py",
    "tests/jaxcomp/lowrank/test_matricize.py",
    "tests/docs/test_adopt.py::test_all_loops_are_there",
)


@pytest.fixture(scope="module")
def distribution(tmp_path_factory):
    """A folder with an sdist and a wheel."""
    place = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(place)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return place


def test_the_sdist_holds_what_its_tests_need_and_they_run(distribution, tmp_path):
    (archive,) = distribution.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert unpacked.name == f"jaxcomp-{jaxcomp.__version__}"
    here = {
        file.relative_to(ROOT)
        for folder in SHIPPED
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert not [str(file) for file in here if not (unpacked / file).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SAMPLE]
    run = subprocess.run(
        command,
        cwd=unpacked,
        env=os.environ | {"PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_wheel_holds_both_packages_and_both_commands(distribution):
    (archive,) = distribution.glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        names = wheel.namelist()
        (commands,) = (name for name in names if name.endswith("entry_points.txt"))
        scripts = wheel.read(commands).decode()
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {
        "jaxcomp",
        "torch_bridge",
    }
    assert "jaxcomp/py.typed" in names
    assert "jaxcomp = jaxcomp.__main__:main" in scripts
    assert "torch-bridge = torch_bridge.__main__:main" in scripts
