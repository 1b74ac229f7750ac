#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that what the Markdown files name is there: paths, tests, commands, variables, quoted code; and that documents named
in source comments are.

Markers, each in a line of its own before a fenced block:
  <!-- run -->                       the block is run by --run, from the root, and must succeed
  <!-- quote FILE -->                the block quotes lines of FILE; a line of '// ...' leaves some out
  <!-- output PROGRAM ARGUMENTS -->  the block, of ```text, is what that one of --programs prints (--outputs); only for output
                                     that depends on nothing but the program and files of the tree
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import tree

PATH = re.compile(r"^(?:\./)?[\w.-]+(?:/[\w.*{},-]*)*$")
SOURCE_NAME = re.compile(r"^[\w*-]+\.(hpp|cpp|cuh|cu|py|md|cmake)$")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
SPAN = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^(?:<!-- (run|quote [^>]+) -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)
OUTPUT = re.compile(r"^<!-- output (\S+) ([^\n]+) -->\n(?:```text\n(.*?)^```$)?", re.M | re.S)
SHELL = {"sh", "bash", "console"}
VARIABLE = re.compile(r"\bWEFT_[A-Z_]+\b")
TEST = re.compile(r"^\w+(?:Test|Conformance)\.(?:\w+|\*)$")
PYTEST = re.compile(r"^def (test_\w+)\(", re.M)
DEFINED_TEST = re.compile(r"^(?:TEST|TEST_F|TEST_P|TYPED_TEST)\(\s*(\w+),\s*(\w+)", re.M)


class Checker:
    def __init__(self, root, programs):
        self.root, self.programs, self.help_texts = root, programs, {}
        self.names = {path.name for path in tree.files(root, "")}
        self.folders = {path.name for path in root.iterdir() if path.is_dir()}
        self.targets = set(re.findall(r"^([\w-]+):", (root / "Makefile").read_text(), re.M))
        presets = json.loads((root / "CMakePresets.json").read_text())["configurePresets"]
        self.presets = {preset["name"] for preset in presets}
        paths = tree.files(root, ".hpp", ".cpp", ".cu", ".cmake", ".txt", ".py", ".json") + list(root.glob("scripts/*"))
        self.variables = {name for path in paths for name in VARIABLE.findall(path.read_text(errors="replace"))}

        sources = [(path, path.read_text()) for path in tree.files(root, ".cpp", ".py") if path.is_relative_to(root / "tests")]
        tests = [test for _, text in sources for test in DEFINED_TEST.findall(text)]
        self.tests = {f"{suite}.{name}" for suite, test in tests for name in (test, "*")}
        self.tests |= {f"{path.relative_to(root)}::{name}" for path, text in sources for name in PYTEST.findall(text)}

    def path_problem(self, document, name):
        """For what looks like a path of the tree; a name with a star must match something."""
        name = name.rstrip("/").removeprefix("./")
        if name.startswith(("build/", "/", "~")) or name in ("build", ""):
            return None
        bases = (self.root, document.parent)
        there = any((base / name).exists() or ("*" in name and any(base.glob(name))) for base in bases)
        return None if there else f"{name} does not exist"

    def span_problem(self, document, text):
        """Inline code: a test, a command, a path, or none of these."""
        if TEST.match(text) or text.startswith("tests/") and "::" in text:
            return None if text in self.tests else f"no test is called {text}"
        if len(text.split()) > 1 or text.startswith("scripts/"):
            return self.command_problem(text)
        if "/" in text and PATH.match(text) and text.lstrip("./").split("/")[0] in self.folders:
            return self.path_problem(document, text)
        if SOURCE_NAME.match(text) and "*" not in text and text not in self.names:
            return f"no file is called {text}"
        return None

    def command_problem(self, line):
        """For one line of shell; unknown commands are nobody's business."""
        words = re.sub(r"^\$ |^\w+=\S+ | -- .*", "", line.strip()).split() or [""]
        command, arguments = words[0], words[1:]
        if command == "make":
            unknown = [a for a in arguments if re.match(r"^[a-z]", a) and a not in self.targets]
            return f"make has no target {unknown[0]}" if unknown else None
        if command in ("cmake", "ctest") and "--preset" in arguments:
            preset = arguments[arguments.index("--preset") + 1]
            return None if preset in self.presets else f"no preset is called {preset}"
        if command.startswith(("scripts/", "tools/")):
            return None if (self.root / command).is_file() else f"{command} does not exist"
        name = command.rsplit("/", 1)[-1]
        return self.option_problem(name, arguments) if name in self.programs else None

    def option_problem(self, name, arguments):
        command = (name, *(a for a in arguments[:1] if re.match(r"^[a-z]+$", a)))
        if command not in self.help_texts:
            shown = subprocess.run([self.programs[name], *command[1:], "--help"], capture_output=True, text=True, timeout=30)
            self.help_texts[command] = shown.stdout if shown.returncode == 0 else None
        if self.help_texts[command] is None:
            return f"{name} has no subcommand {command[1]}"
        for option in filter(None, (re.match(r"^--?[a-z][\w-]*", argument) for argument in arguments)):
            if not re.search(rf"{re.escape(option.group())}(?![\w-])", self.help_texts[command]):
                return f"{' '.join(command)} has no option {option.group()}"
        return None

    def quote_problem(self, name, body):
        """The block's lines stand in the file in this order; '// ...' lines skip some of the file's."""
        if not (self.root / name).is_file():
            return f"{name} does not exist"
        lines = [line.strip() for line in (self.root / name).read_text().splitlines() if line.strip()]
        place, may_skip = 0, True
        for line in filter(None, map(str.strip, body.splitlines())):
            if line.startswith("// ..."):
                may_skip = True
                continue
            if line not in lines[place : len(lines) if may_skip else place + 1]:
                return f"{name} does not go on with: {line}"
            place, may_skip = lines.index(line, place) + 1, False
        return None

    def findings_of(self, document):
        text = document.read_text()
        found = []
        for marker, language, body in FENCE.findall(text):
            if marker.startswith("quote"):
                found.append(self.quote_problem(marker.split()[1], body))
            if language in SHELL:
                lines = body.replace("\\\n", " ").splitlines()
                found += [self.command_problem(line.split(" #")[0]) for line in lines]
        prose = FENCE.sub("", text)
        found += [long_line(line) for line in prose.splitlines()]
        found += [self.path_problem(document, link) for link in LINK.findall(prose) if not link.startswith(("http", "mailto:"))]
        found += [self.span_problem(document, span) for span in SPAN.findall(prose) if span.strip()]
        found += [f"nothing reads {name}" for name in sorted(set(VARIABLE.findall(text)) - self.variables)]
        return [f"{document.relative_to(self.root)}: {problem}" for problem in found if problem]


def long_line(line):
    is_prose = not line.startswith(("|", "<!--"))
    return f"a line of {len(line)} characters (at most 120): {line[:40]}..." if is_prose and len(line) > 120 else None


def source_findings(root):
    paths = [path for path in tree.files(root, ".hpp", ".cpp", ".cuh", ".cu", ".cmake", ".py") if "tests" not in path.parts]
    named = [(path, name) for path in paths for name in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text())]
    return [f"{path.relative_to(root)}: {name} does not exist" for path, name in named if not (root / name).is_file()]


def run_blocks(root, documents):
    findings = []
    blocks = [(document, block) for document in documents for block in FENCE.findall(document.read_text())]
    for document, (marker, _, body) in blocks:
        if marker == "run":
            print(f"-- {document.relative_to(root)}\n{body}", flush=True)
            status = subprocess.run(["bash", "-euo", "pipefail", "-c", body], cwd=root).returncode
            findings += [f"{document.relative_to(root)}: exit status {status} of:\n{body}"] if status else []
    return findings


def output_blocks(root, documents, programs, write):
    findings = []

    def fill(match):
        name, arguments, block = match.groups()
        if name not in programs:  # not built here
            return match.group()
        done = subprocess.run([programs[name], *shlex.split(arguments)], cwd=root, capture_output=True, text=True)
        if block is None:
            findings.append(f"{place}: no ```text block follows output {name} {arguments}")
        elif done.returncode != 0:
            findings.append(f"{place}: {name} {arguments} ended with {done.returncode}: {done.stderr.strip()}")
        elif write:
            return f"<!-- output {name} {arguments} -->\n```text\n{done.stdout}```"
        elif block != done.stdout:
            findings.append(f"{place}: {name} {arguments} prints something else")
        return match.group()

    for document in documents:
        place, text = document.relative_to(root), document.read_text()
        wanted = OUTPUT.sub(fill, text)
        if wanted != text:
            document.write_text(wanted)
    return findings


def main():
    parser = tree.parser(__doc__.splitlines()[0])
    parser.add_argument("--programs", type=Path, nargs="*", default=[], help="built here: commands and options that documents name")
    parser.add_argument("--run", action="store_true", help="run the marked blocks instead")
    parser.add_argument("--outputs", choices=["check", "write"], help="compare marked blocks with what --programs print, or write it")
    args = parser.parse_args()
    root, programs = args.root.resolve(), {path.name: path.resolve() for path in args.programs}
    documents = tree.files(root, ".md")
    if args.run:
        findings = run_blocks(root, documents)
    elif args.outputs:
        findings = output_blocks(root, documents, programs, args.outputs == "write")
    else:
        checker = Checker(root, programs)
        findings = [finding for document in documents for finding in checker.findings_of(document)] + source_findings(root)
    return tree.report("check_docs", findings, f"{len(documents)} documents are true")


if __name__ == "__main__":
    sys.exit(main())
