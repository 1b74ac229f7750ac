#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that no source or test file is forgotten by CMake and that no test has disappeared.

tests/manifest.txt lists every test; a parameterised one stands once. After adding or removing
tests on purpose: tools/check_tests.py --build build/cpu --update
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import tree

HEADER = "# Every test, written by tools/check_tests.py --update. A test missing from a build fails it.\n"


def names(lists, name):
    """Whether a CMakeLists.txt names the file, whole or as '${x}_test.cpp' in a loop over words."""
    if re.search(rf"(?<![\w/]){re.escape(name)}(?!\w)", lists):
        return True
    for pattern in re.findall(r"[\w/]*\$\{\w+\}[\w/]*\.\w+", lists):
        before, after = re.split(r"\$\{\w+\}", pattern, maxsplit=1)
        word = re.fullmatch(re.escape(before) + r"(\w+)" + re.escape(after), name)
        if word and re.search(rf"(?<!\w){word.group(1)}(?!\w)", lists):
            return True
    return False


def unlisted_files(root):
    """Sources and tests that no CMakeLists.txt in their folder or above names."""
    findings = []
    sources = tree.files(root, ".cpp", ".cu")
    sources += [p for p in tree.files(root / "tests", ".py") if p.name.startswith("test_")]
    for path in sources:
        if "consumer" in path.parts:  # a project of its own
            continue
        if path.is_relative_to(root / "tests" / "python"):  # pytest runs what it finds there
            continue
        folder = path.parent
        listed = False
        while folder.is_relative_to(root) and not listed:
            lists = folder / "CMakeLists.txt"
            if lists.is_file():
                listed = names(lists.read_text(), path.relative_to(folder).as_posix())
            folder = folder.parent
        if not listed:
            findings.append(f"{path.relative_to(root)}: no CMakeLists.txt lists it")
    return findings


def base_name(test):
    """One name for all parameters: 'All/PlanTest.Works/3' and 'PlanTest/2.Works' lose theirs."""
    return re.sub(r"/\d+(?=\.)", "", re.sub(r"(\.[^/]+)/.*", r"\1", test))


def registered_tests(build):
    shown = subprocess.run(
        ["ctest", "--test-dir", str(build), "--show-only=json-v1"],
        check=True,
        capture_output=True,
        text=True,
    )
    return {base_name(test["name"]) for test in json.loads(shown.stdout)["tests"]}


def manifest_findings(manifest, registered):
    lines = manifest.read_text().splitlines() if manifest.is_file() else []
    wanted = {line for line in lines if line and not line.startswith("#")}
    hint = "(tools/check_tests.py --update if that is meant)"
    findings = [f"{test}: listed in {manifest.name}, but not built {hint}" for test in wanted - registered]
    findings += [f"{test}: built, but not listed in {manifest.name} {hint}" for test in registered - wanted]
    return sorted(findings)


def main():
    parser = tree.parser(__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, help="a built tree to compare with tests/manifest.txt")
    parser.add_argument("--update", action="store_true", help="write tests/manifest.txt from --build")
    args = parser.parse_args()
    root = args.root.resolve()
    manifest = root / "tests" / "manifest.txt"
    findings = unlisted_files(root)
    summary = "every source is listed"
    if args.build:
        registered = registered_tests(args.build)
        if args.update:
            manifest.write_text(HEADER + "".join(f"{test}\n" for test in sorted(registered)))
        findings += manifest_findings(manifest, registered)
        summary += f", all {len(registered)} tests are there"
    return tree.report("check_tests", findings, summary)


if __name__ == "__main__":
    sys.exit(main())
