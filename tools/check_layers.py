#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that folders include only downwards and that foreign headers stay where they belong."""

import re
import sys

import tree

# A folder may include itself and folders of a lower level, not its neighbours.
LEVELS = {
    "src/core": 0,
    "src/group": 1,
    "src/plan": 1,
    "src/transport": 2,
    "src/kernels": 2,
    "src/exchange": 3,
    "src/overlap": 3,
    "src/moe": 4,
    "src/simulate": 4,
    "apps": 5,
    "bench": 5,
    "python": 5,
}
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]')
CUDA = re.compile(r"^(cuda|cub/|cutlass/|cute/|thrust/|cooperative_groups|nccl|nv[^/]*\.h)")
TORCH = re.compile(r"^(torch|ATen|c10)/")
CUDA_PLACES = re.compile(r"^(src/kernels/|src/transport/peer/|tests/gpu/)|(_cuda|_rivals?)\.(cpp|cu|hpp|cuh)$")


def folder_of(path):
    """The folder of the table that holds the path; None outside the layers."""
    return next((folder for folder in LEVELS if path.startswith(folder + "/")), None)


def folder_named(root, includer, name):
    """The folder of the table that '#include "name"' leads to; None for a public header."""
    if name.startswith("weft/"):
        return None
    beside = (includer.parent / name).resolve()
    if beside.is_file() and beside.is_relative_to(root):
        return folder_of(beside.relative_to(root).as_posix())
    return folder_of("src/" + name) or folder_of(name)


def layer_problem(mine, theirs):
    if theirs is None or mine is None or theirs == mine:
        return None
    if LEVELS[theirs] < LEVELS[mine]:
        return None
    return f"{mine} (L{LEVELS[mine]}) may not include {theirs} (L{LEVELS[theirs]})"


def problem(root, path, bracket, name):
    """Why this file may not include that name; None if it may."""
    place = path.relative_to(root).as_posix()
    if TORCH.match(name):
        return "torch headers are allowed nowhere"
    if CUDA.match(name) and not CUDA_PLACES.search(place):
        return "CUDA headers belong in src/kernels, src/transport/peer and *_cuda files"
    if place.startswith("include/"):
        is_standard = bracket == "<" and re.fullmatch(r"[a-z_0-9]+", name)
        if not is_standard and not name.startswith("weft/"):
            return "public headers include only the standard library and each other"
    if place.startswith("examples/") and bracket == '"' and not name.startswith("weft/"):
        return "examples include only public headers"
    if bracket == '"':
        return layer_problem(folder_of(place), folder_named(root, path, name))
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
