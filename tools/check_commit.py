#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the message of a commit: a component, what the change does, and in the body why.

Git calls it as the hook commit-msg with the file of the message; with --range it checks commits.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import tree

SUBJECT = re.compile(r"[a-z0-9_./+-]+(, [a-z0-9_./+-]+)*: [a-z]\S*( |$)")
MOST = 72  # characters of a subject
KEPT = ("Merge ", "Revert ", "fixup! ", "squash! ")  # by git


def problems(message):
    lines = [line.rstrip() for line in message.splitlines() if not line.startswith("#")]
    subject, *rest = lines or [""]
    if subject.startswith(KEPT):
        return
    if not SUBJECT.match(subject):
        yield f'subject "{subject}" (expected "component: imperative", in lower case)'
    if len(subject) > MOST:
        yield f"subject of {len(subject)} characters (at most {MOST})"
    if rest and rest[0]:
        yield "no blank line behind the subject"
    if not any(rest):
        yield "no body (it says why, and how it was tested)"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", help="the message")
    parser.add_argument("--range", help="commits, as git log takes them")
    args = parser.parse_args()
    if args.range:
        log = ["git", "log", "--format=%h%x00%B%x01", args.range]
        texts = subprocess.run(log, capture_output=True, text=True, check=True).stdout.split("\x01")
        messages = [text.strip().split("\0") for text in texts if text.strip()]
    else:
        messages = [("message", Path(args.file).read_text() if args.file else sys.stdin.read())]
    findings = [f"{name}: {problem}" for name, text in messages for problem in problems(text)]
    return tree.report("check_commit", findings, f"{len(messages)} messages say what and why")


if __name__ == "__main__":
    sys.exit(main())
