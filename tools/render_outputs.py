#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fills the blocks of documents that show what the program prints, and checks that they still do.

Before a fenced block, in a line of its own:
  <!-- output weft ARGUMENTS -->   the block is what the command prints, run from the root

Only for commands whose output depends on nothing but the program and files of the tree.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import tree

MARKED = re.compile(r"^<!-- output weft ([^\n]+) -->\n```text\n(.*?)^```$", re.M | re.S)
UNFENCED = re.compile(r"^<!-- output (?!weft .+ -->\n```text$).*$", re.M)


def printed(root, weft, arguments):
    """(what the command prints, why it did not)"""
    done = subprocess.run([weft, *shlex.split(arguments)], cwd=root, capture_output=True, text=True)
    if done.returncode != 0:
        return None, f"weft {arguments} ended with {done.returncode}: {done.stderr.strip()}"
    return done.stdout, None


def with_outputs(root, weft, text):
    """The document as it should be, and what is wrong with its commands."""
    findings = []

    def fill(match):
        output, problem = printed(root, weft, match.group(1))
        if problem:
            findings.append(problem)
            return match.group()
        return f"<!-- output weft {match.group(1)} -->\n```text\n{output}```"

    findings += [f"no ```text block follows {line}" for line in UNFENCED.findall(text)]
    return MARKED.sub(fill, text), findings


def main():
    parser = tree.parser(__doc__.splitlines()[0])
    parser.add_argument("--weft", required=True, help="the built program")
    parser.add_argument("--check", action="store_true", help="report what differs, write nothing")
    args = parser.parse_args()
    root = args.root.resolve()
    weft = Path(args.weft).resolve()
    findings, num_blocks = [], 0
    for document in tree.files(root, ".md"):
        text = document.read_text()
        num_blocks += len(MARKED.findall(text))
        wanted, problems = with_outputs(root, weft, text)
        place = document.relative_to(root)
        findings += [f"{place}: {problem}" for problem in problems]
        if wanted != text and args.check:
            findings.append(f"{place}: differs from what the program prints")
        elif wanted != text:
            document.write_text(wanted)
            print(f"wrote {place}")
    return tree.report(
        "render_outputs", findings, f"{num_blocks} blocks are what the program prints"
    )


if __name__ == "__main__":
    sys.exit(main())
