"""Addresses for a release: `urls`, and a README whose links still lead somewhere on an index page.

The repository's address is known where a tag is built by a workflow, from the variables that GitHub
sets for every job. Anywhere else the README stays as it is, and there are no urls.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_README = "README.md"
# Code, in which brackets are no links, or the target of a relative link.
_CODE_OR_LINK = re.compile(r"^```.*?^```|`[^`]*`|\]\((?!\w+:|#)([^)]+)\)", re.DOTALL | re.MULTILINE)


class Addresses(MetadataHookInterface):
    """Sets `readme` and, for a tag, `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Complete the table ``[project]``."""
        if "readme" in metadata:  # a wheel made of an sdist, which brings both along
            return
        repository = _repository(os.environ)
        if repository is None:
            metadata |= {"readme": _README, "urls": {}}
            return
        tag = os.environ["GITHUB_REF_NAME"]
        root = pathlib.Path(self.root)
        text = with_addresses((root / _README).read_text("utf-8"), root, repository, tag)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {
            "Homepage": repository,
            "Documentation": f"{repository}/blob/{tag}/docs/index.md",
            "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
            "Issues": f"{repository}/issues",
            "Source": f"{repository}/tree/{tag}",
        }


def _repository(variables: Mapping[str, str]) -> str | None:
    if variables.get("GITHUB_REF_TYPE") != "tag":
        return None
    return f"{variables['GITHUB_SERVER_URL']}/{variables['GITHUB_REPOSITORY']}"


def with_addresses(text: str, root: pathlib.Path, repository: str, tag: str) -> str:
    """Markdown whose relative links and pictures are those of `repository` at `tag`.

    Raises:
      ValueError: A link leads to nothing in `root`.
    """

    def absolute(found: re.Match[str]) -> str:
        target = found[1]
        if target is None:
            return found[0]
        path = root / target.partition("#")[0]
        if not path.exists():
            raise ValueError(f"{_README} has a link to {target}, which does not exist")
        shown_as = "tree" if path.is_dir() else "raw" if path.suffix in (".png", ".svg") else "blob"
        return f"]({repository}/{shown_as}/{tag}/{target})"

    return _CODE_OR_LINK.sub(absolute, text)
