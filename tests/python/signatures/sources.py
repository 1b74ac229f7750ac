# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/signatures.md, and the sources of other packages that they name."""

import re
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from packages import ROOT, wheel


def rows(width: str) -> list[list[str]]:
    """The cells of the page's table whose head begins with the word."""
    text = (ROOT / "docs/signatures.md").read_text()
    (table,) = re.findall(rf"^\| {width} .*\n\|[-:|]+\|\n((?:\|.*\n)+)", text, re.M)
    lines = [line.strip("|").split(" | ") for line in table.splitlines()]
    return [[cell.strip() for cell in line] for line in lines]


def differences_of(table: list[tuple[str, str, str]], file: str) -> dict[str, set[str]]:
    """What the rows (end of a file's path, name, differences) allow in `file`, by name."""
    found: dict[str, set[str]] = {}
    for ending, name, what in table:
        if file.endswith(ending):
            assert name not in found, f"{file}: {name} stands twice"
            found[name] = set(what.split("; "))
    return found


def source(package: str, file: str) -> str:
    """The text of a package's file, as it is installed or in its wheel."""
    name, wanted = package.split()
    if find_spec(file.partition("/")[0]) is not None and name != "sgl-deep-ep":
        assert version(name) == wanted
        folder = Path(find_spec(file.partition("/")[0]).submodule_search_locations[0]).parent
        return (folder / file).read_text()
    with zipfile.ZipFile(wheel(package)) as packed:
        return packed.read(file).decode()
