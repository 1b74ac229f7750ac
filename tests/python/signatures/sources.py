# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/signatures.md, and the sources of other packages that they name."""

import re
import zipfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from packages import ROOT, wheel


def rows(width: str) -> list[list[str]]:
    """The cells of the page's table whose head begins with the word."""
    text = (ROOT / "docs/signatures.md").read_text()
    (table,) = re.findall(rf"^\| {width} .*\n\|[-:|]+\|\n((?:\|.*\n)+)", text, re.M)
    lines = [line.strip("|").split(" | ") for line in table.splitlines()]
    return [[cell.strip() for cell in line] for line in lines]


def allowed(width: str) -> list[tuple[str, str, str]]:
    """A table of differences: the end of a file's path, and perhaps the version of its package; the
    name; what differs."""
    return [(file.replace("`", ""), name.strip("`"), what) for file, name, what, _ in rows(width)]


def is_of(ending: str, package: str, file: str) -> bool:
    """True if a row of `allowed` is about the file of a package, "name version"."""
    return f"{file} {package.split()[1]}".endswith(ending) or file.endswith(ending)


def differences_of(
    table: list[tuple[str, str, str]], package: str, file: str
) -> dict[str, set[str]]:
    """Differences that the rows of `allowed` list for the file, by name."""
    found: dict[str, set[str]] = {}
    for ending, name, what in table:
        if is_of(ending, package, file):
            assert name not in found, f"{file}: {name} stands twice"
            found[name] = set(what.split("; "))
    return found


def source(package: str, file: str) -> str:
    """The text of a package's file, as it is installed or in its wheel."""
    name, wanted = package.split()
    try:
        is_installed = version(name) == wanted
    except PackageNotFoundError:
        is_installed = False
    if is_installed:
        spec = find_spec(file.partition("/")[0])
        return (Path(spec.submodule_search_locations[0]).parent / file).read_text()
    with zipfile.ZipFile(wheel(package)) as packed:
        return packed.read(file).decode()
