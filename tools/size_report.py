#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lines per file: the median, and the files that are refused."""

import statistics
import sys

import tree

AT_MOST = {"src/cuda/": 600, "include/": 200, "": 500}  # by the begin of the path


def main():
    root = tree.parser(__doc__).parse_args().root.resolve()
    sizes, findings = [0], []
    for path in tree.files(root, ".hpp", ".cpp", ".cuh", ".cu", ".h", ".py"):
        place, lines = path.relative_to(root).as_posix(), len(path.read_text().splitlines())
        limit = next(limit for start, limit in AT_MOST.items() if place.startswith(start))
        findings += [f"{place}: {lines} lines (at most {limit})"] if lines > limit else []
        sizes.append(lines)
    median = statistics.median(sizes[1:] or sizes)
    return tree.report("size_report", findings, f"{len(sizes) - 1} files, {sum(sizes)} lines, median {median:.0f}")


if __name__ == "__main__":
    sys.exit(main())
