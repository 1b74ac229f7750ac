#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks how many comments of C++ and docstrings of Python open in the middle of a sentence, and
that no more do than before."""

import ast
import re
import sys

import tree

FRAGMENT = re.compile(
    r"(Of|By|As|To|In|What|Where|Whether|Which|The same|Those|Who|Whose|Whoever|Likewise)\b"
)
COMMENT = re.compile(r"\s*//\s?(.*)")
# Percent that may open so: some are whole sentences ("Where ranks differ, both are told.").
MOST = {"comments": 1.0, "docstrings": 1.0}
SOURCES = (".cpp", ".hpp", ".cu", ".cuh", ".h")


def openings_of_comments(text):
    """Line and first words of each block of comment lines; those behind code are none."""
    was_comment = False
    for number, line in enumerate(text.splitlines(), 1):
        found = COMMENT.match(line)
        words = found.group(1).strip() if found else ""
        is_prose = bool(words) and not words.startswith(("SPDX", "NOLINT", "clang-format", "---"))
        if is_prose and not was_comment:
            yield number, words
        was_comment = is_prose


def openings_of_docstrings(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            words = ast.get_docstring(node)
            if words:
                yield node.body[0].lineno, words.splitlines()[0]


def openings(root):
    """Kind, path, line and words of each."""
    for path in tree.files(root, *SOURCES):
        for line, words in openings_of_comments(path.read_text()):
            yield "comments", path.relative_to(root), line, words
    for path in tree.files(root, ".py"):
        for line, words in openings_of_docstrings(path.read_text()):
            yield "docstrings", path.relative_to(root), line, words


def main():
    parser = tree.parser(__doc__)
    parser.add_argument("--list", metavar="FOLDER", help="print those of a folder, and check nothing")
    args = parser.parse_args()
    found = list(openings(args.root.resolve()))
    if args.list is not None:
        for _, path, line, words in found:
            if path.is_relative_to(args.list) and FRAGMENT.match(words):
                print(f"{path}:{line}: {words}")
        return 0
    findings, told = [], []
    for kind, most in MOST.items():
        all_words = [words for one, _, _, words in found if one == kind]
        share = 100 * sum(bool(FRAGMENT.match(words)) for words in all_words) / max(1, len(all_words))
        told.append(f"{share:.1f} % of {len(all_words)} {kind}")
        if share > most:
            findings.append(f"{told[-1]} open with a fragment (at most {most} %; --list FOLDER prints them)")
    return tree.report("check_prose", findings, f"{' and '.join(told)} open with a fragment")


if __name__ == "__main__":
    sys.exit(main())
