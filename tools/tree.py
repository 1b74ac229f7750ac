# SPDX-License-Identifier: Apache-2.0
"""Functions that the tools share: the files of the tree and how findings are told."""

import argparse
import os
from pathlib import Path

SKIPPED_FOLDERS = {"build", "__pycache__", "node_modules"}
ROOT = Path(__file__).resolve().parent.parent


def files(root, *suffixes):
    """Paths below root that end in one of the suffixes, sorted; hidden and built ones are left out."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [d for d in subfolders if d not in SKIPPED_FOLDERS and not d.startswith(".")]
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted(found)


def parser(description):
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--root", type=Path, default=ROOT, help="tree to look at (default: this one)")
    return result


def report(tool, findings, summary):
    """Prints the findings, one a line, then the summary; returns the exit status."""
    print(*findings, f"{tool}: {f'{len(findings)} findings' if findings else summary}", sep="\n", flush=True)
    return 1 if findings else 0
