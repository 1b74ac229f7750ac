#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that folders include only downwards and that foreign headers stay where they belong."""

import re
import sys

import tree

# A room may include itself and rooms on lower floors, not its neighbours.
FLOORS = {
    "src/core": 0,
    "src/group": 1,
    "src/plan": 1,
    "src/transport": 2,
    "src/call": 2,
    "src/survive": 3,
    "src/cpu": 4,
    "src/cuda": 4,
    "src/hosts": 5,
    "src/overlap": 5,
    "src/exchange": 6,
    "apps/shared": 7,
    "tests/support": 7,
    "lab/train": 8,
    "lab/simulate": 8,
    "tests/survivors": 8,
    "apps/weft": 9,
    "bench": 9,
    "python": 10,
}
# Where `#include "name"` is looked for, after the includer's own folder; as in CMake.
INCLUDE_PATHS = ("src", "lab", "apps/shared", "apps/weft", "bench", "tests")
GENERATED = {"commit.hpp"}  # by CMake
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]')
CUDA = re.compile(r"^(cuda(?!/)|cub/|cutlass/|cute/|thrust/|cooperative_groups|nccl\.|nv[^/]*\.h)")
TORCH = re.compile(r"^(torch|ATen|c10)/")
CUDA_PLACES = re.compile(
    r"^(src/core/gpu/|src/cuda/|src/hosts/|tests/gpu/)|(_cuda|_rivals?)\.(cpp|cu|hpp|cuh)$"
)


def room_of(path):
    """The room of the table that holds the path; None outside of the floors."""
    return next((room for room in FLOORS if path.startswith(room + "/")), None)


def room_named(root, includer, name):
    """The room that `#include "name"` leads to; None for a public header, '' for a name that leads nowhere."""
    if name.startswith("weft/") and (root / "include" / name).is_file():
        return None
    for folder in (includer.parent, *(root / path for path in INCLUDE_PATHS)):
        found = (folder / name).resolve()
        if found.is_file() and found.is_relative_to(root):
            return room_of(found.relative_to(root).as_posix())
    return ""


def layer_problem(mine, theirs, name):
    if theirs == "":
        return None if name in GENERATED else "no file of this tree has that name"
    if theirs is None or mine is None or theirs == mine:
        return None
    if FLOORS[theirs] < FLOORS[mine]:
        return None
    return f"{mine} (floor {FLOORS[mine]}) may not include {theirs} (floor {FLOORS[theirs]})"


def problem(root, path, bracket, name):
    """Why this file may not include that name; None if it may."""
    place = path.relative_to(root).as_posix()
    if TORCH.match(name):
        return "torch headers are allowed nowhere"
    if CUDA.match(name) and not CUDA_PLACES.search(place):
        return "CUDA headers belong in src/cuda, src/hosts, the folders named gpu and *_cuda files"
    if place.startswith("include/"):
        is_standard = bracket == "<" and re.fullmatch(r"[a-z_0-9]+", name)
        if not is_standard and not name.startswith("weft/"):
            return "public headers include only the standard library and each other"
    if place.startswith("examples/") and bracket == '"' and not name.startswith("weft/"):
        return "examples include only public headers"
    if bracket == '"' and room_of(place) is not None:
        return layer_problem(room_of(place), room_named(root, path, name), name)
    return None


def check(root):
    findings = []
    num_includes = 0
    for path in tree.files(root, ".hpp", ".cpp", ".cuh", ".cu", ".h"):
        for line_idx, line in enumerate(path.read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            num_includes += 1
            why = problem(root, path, *match.groups())
            if why:
                findings.append(f"{path.relative_to(root)}:{line_idx}: {match.group(2)}: {why}")
    return findings, num_includes


def main():
    args = tree.parser(__doc__).parse_args()
    findings, num_includes = check(args.root.resolve())
    return tree.report("check_layers", findings, f"{num_includes} includes point downwards")


if __name__ == "__main__":
    sys.exit(main())
