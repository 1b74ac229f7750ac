#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lines per file: the median, the files to ask about, and the files that are refused."""

import statistics
import sys

import tree

ASK_ABOVE = 300
REFUSE_ABOVE = 500
REFUSE_KERNELS_ABOVE = 600
REFUSE_PUBLIC_HEADERS_ABOVE = 200
SUFFIXES = (".hpp", ".cpp", ".cuh", ".cu", ".h", ".py")


def limit_of(place):
    if place.startswith("src/kernels/"):
        return REFUSE_KERNELS_ABOVE
    if place.startswith("include/"):
        return REFUSE_PUBLIC_HEADERS_ABOVE
    return REFUSE_ABOVE


def measure(root):
    """(lines, place) of each source file, longest first."""
    sizes = []
    for path in tree.files(root, *SUFFIXES):
        sizes.append((len(path.read_text().splitlines()), path.relative_to(root).as_posix()))
    return sorted(sizes, reverse=True)


def main():
    args = tree.parser(__doc__).parse_args()
    sizes = measure(args.root.resolve())
    findings = [
        f"{place}: {lines} lines (at most {limit_of(place)})"
        for lines, place in sizes
        if lines > limit_of(place)
    ]
    for lines, place in sizes:
        if ASK_ABOVE < lines <= limit_of(place):
            print(f"{lines:5d}  {place}")
    median = statistics.median(lines for lines, _ in sizes) if sizes else 0
    total = sum(lines for lines, _ in sizes)
    return tree.report(
        "size_report", findings, f"{len(sizes)} files, {total} lines, median {median:.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
