"""What is published: the sdist runs its own tests, the wheel holds both packages and commands."""

import functools
import importlib.metadata
import importlib.util
import itertools
import pathlib
import re
import shutil
import tomllib
import venv
import zipfile

import pytest
from packaging.version import Version

import jaxcomp
from tests.helpers.paths import ROOT
from tests.helpers.script import python

SHIPPED = ("jaxcomp", "torch_bridge", "tests", "examples", "docs", "benchmarks")
SAMPLE = (
    "tests/jaxcomp/bytes/test_ranks.py::test_zero_gradients_get_one_column",
    "tests/docs/test_adopt.py::test_all_loops_are_there",
)

# What GitHub sets for a job of a branch, and for one of a tag.
BRANCH = {"GITHUB_REF_TYPE": "branch", "GITHUB_REF_NAME": "main"}
TAG = {"GITHUB_REF_TYPE": "tag", "GITHUB_REF_NAME": "v7.0.0"}
ADDRESS = {
    "GITHUB_SERVER_URL": "https://forge.example.invalid",
    "GITHUB_REPOSITORY": "someone/jaxcomp",
}
REPOSITORY = "https://forge.example.invalid/someone/jaxcomp"


def build(root, place, *arguments, variables=BRANCH):
    python("-m", "hatchling", "build", "-d", place, *arguments, cwd=root, **ADDRESS, **variables)


def wheel_in(place):
    (archive,) = place.glob("*.whl")
    folders = zipfile.Path(archive).iterdir()
    (about,) = (folder for folder in folders if folder.name.endswith(".dist-info"))
    return importlib.metadata.PathDistribution(about)


@pytest.fixture(scope="module")
def distribution(tmp_path_factory):
    """Builds an sdist and a wheel in a folder."""
    place = tmp_path_factory.mktemp("dist")
    build(ROOT, place)
    return place


def unpacked(place, where):
    """Unpacks an sdist; returns its folder."""
    (archive,) = place.glob("*.tar.gz")
    shutil.unpack_archive(archive, where, filter="data")
    return where / f"jaxcomp-{jaxcomp.__version__}"


def test_the_sdist_installs_into_an_empty_environment_and_its_tests_run_there(
    distribution, tmp_path
):
    """Dependencies come from outside, jaxcomp and what its tests need from the archive alone."""
    source = unpacked(distribution, tmp_path)
    for folder in SHIPPED:
        for file in (ROOT / folder).rglob("*"):
            if "__pycache__" not in file.parts:
                assert (source / file.relative_to(ROOT)).exists(), file
    venv.create(tmp_path / "env")
    outside = str(pathlib.Path(pytest.__file__).parents[1])
    where = {"executable": tmp_path / "env/bin/python", "cwd": tmp_path, "PYTHONPATH": outside}
    run = functools.partial(python, **where)
    run("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", source)
    for package in ("jaxcomp", "torch_bridge"):
        shutil.rmtree(source / package)
    shown = "import jaxcomp, torch_bridge; print(jaxcomp.__file__, torch_bridge.__file__)"
    assert run("-c", shown).count(str(tmp_path / "env")) == 2
    sample = [source / file for file in SAMPLE]
    assert "passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", *sample)


def test_the_wheel_holds_both_packages_and_both_commands(distribution):
    wheel = wheel_in(distribution)
    folders = {file.parts[0] for file in wheel.files}
    assert {name for name in folders if "dist-info" not in name} == {"jaxcomp", "torch_bridge"}
    assert pathlib.PurePosixPath("jaxcomp/py.typed") in wheel.files
    commands = {(command.name, command.value) for command in wheel.entry_points}
    assert ("jaxcomp", "jaxcomp.__main__:main") in commands
    assert ("torch-bridge", "torch_bridge.__main__:main") in commands


def test_without_a_tag_the_readme_is_shown_as_it_is(distribution):
    shown = wheel_in(distribution).metadata
    assert shown["Description"] == (ROOT / "README.md").read_text()
    assert not shown.get_all("Project-URL")


def test_of_a_tag_links_lead_to_the_repository_also_in_a_wheel_made_of_the_sdist(tmp_path):
    release = tmp_path / "release"
    again = tmp_path / "again"
    build(ROOT, release, variables=TAG)
    shown = wheel_in(release).metadata
    assert f"Homepage, {REPOSITORY}" in shown.get_all("Project-URL")
    page = f"Documentation, {REPOSITORY}/blob/v7.0.0/docs/index.md"
    assert page in shown.get_all("Project-URL")
    text = shown["Description"]
    assert not re.search(r"\]\((?!https://)", text)
    assert not re.search(r"(src|href|srcset)=|^\[[^]]+\]:", text, re.M)  # nothing else links
    relative = re.sub(rf"{REPOSITORY}/(blob|raw|tree)/v7\.0\.0/", "", text)
    assert relative == (ROOT / "README.md").read_text()
    build(unpacked(release, tmp_path), again, "-t", "wheel")
    assert wheel_in(again).metadata.items() == shown.items()  # with the description


def test_code_is_no_link_and_a_link_to_nothing_is_refused(tmp_path):
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    (tmp_path / "docs").mkdir()
    (tmp_path / "map.svg").touch()

    def shown(text):
        return hook.with_addresses(text, tmp_path, "https://x.invalid", "v1")

    kept = "`fns[0](x)` [a](https://y.invalid/z) [b](#part)\n```python\nfns[0](x)\n```\n"
    assert shown(kept) == kept
    assert shown("[d](docs)") == "[d](https://x.invalid/tree/v1/docs)"
    assert shown("![`m`](map.svg)") == "![`m`](https://x.invalid/raw/v1/map.svg)"
    with pytest.raises(ValueError, match=r"nowhere\.md"):
        shown("[n](nowhere.md#part)")


def test_the_oldest_set_is_what_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = (extras[name] for name in ("examples", "test-jax"))
    declared = itertools.chain(project["dependencies"], *named)
    pinned = (ROOT / "tests/oldest.txt").read_text()
    oldest = dict(re.findall(r"^([^#\s]+)==(\S+)$", pinned, re.MULTILINE))
    for name, floor in re.findall(r"(\S+)>=(\S+)", "\n".join(declared)):
        assert Version(oldest[name]) == Version(floor), name
