#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that every kernel of the library is loaded when an exchange is made: a `prepare_...` of its file names it, or
calls what does, and a .cpp file calls that. A kernel that is loaded at its first launch may wait for one that waits for it.
"""

import re
import sys

import tree

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(?:[A-Z_]+\s+)?(\w+)\s*\(")
FUNCTION = re.compile(r"^[A-Za-z_][^\n;{}()]*?\b(\w+)\([^;{}]*?\)[^;{}()]*\{([^\n]*\}$|.*?^\})", re.S | re.M)
WORD = re.compile(r"[A-Za-z_]\w*")


def read(path):
    return COMMENT.sub("", path.read_text(encoding="utf-8"))


def named_by(name, bodies, seen):
    """All words of a function and of those functions of the file that it names."""
    seen.add(name)
    words = set(WORD.findall(bodies[name]))
    for other in words & bodies.keys() - seen:
        words |= named_by(other, bodies, seen)
    return words


def problems_of(text, called):
    """Kernels of a file that are not prepared. called: words of the library's .cpp files."""
    kernels = KERNEL.findall(text)
    bodies = {}
    for name, body in FUNCTION.findall(text):
        if name not in kernels:
            bodies[name] = bodies.get(name, "") + body  # of all that have the name
    prepared = set()
    for name in bodies:
        if name.startswith("prepare") and name in called:
            prepared |= named_by(name, bodies, set())
    return [name for name in kernels if name not in prepared]


def main():
    root = tree.parser(__doc__).parse_args().root
    sources = tree.files(root / "src", ".cu", ".cuh")
    called = {word for path in tree.files(root / "src", ".cpp") for word in WORD.findall(read(path))}
    findings, num_kernels = [], 0
    for path in sources:
        text = read(path)
        num_kernels += len(KERNEL.findall(text))
        for name in problems_of(text, called):
            findings.append(f"{path.relative_to(root)}: no prepare_... that a .cpp file calls loads {name}")
    return tree.report("check_kernels", findings, f"{num_kernels} kernels are loaded ahead")


if __name__ == "__main__":
    sys.exit(main())
