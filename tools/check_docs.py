#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that what the Markdown files name is there: paths, commands, variables, quoted code; and
that documents named in source comments are.

Markers, each in a line of its own before a fenced block:
  <!-- run -->         the block is run by --run, from the root, and must succeed
  <!-- quote FILE -->  the block quotes lines of FILE; a line of '// ...' leaves some out
"""

import json
import re
import subprocess
import sys

import tree

PATH = re.compile(r"^(?:\./)?[\w.-]+(?:/[\w.*{},-]*)*$")
SOURCE_NAME = re.compile(r"^[\w*-]+\.(hpp|cpp|cuh|cu|py|md|cmake)$")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
SPAN = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^(?:<!-- (run|quote [^>]+) -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)
SHELL = {"sh", "bash", "console"}
VARIABLE = re.compile(r"\bWEFT_[A-Z_]+\b")


class Checker:
    def __init__(self, root, weft):
        self.root = root
        self.weft = weft
        self.help_texts = {}
        self.names = {path.name for path in tree.files(root, "")}
        makefile = root / "Makefile"
        text = makefile.read_text() if makefile.is_file() else ""
        self.targets = set(re.findall(r"^([\w-]+):", text, re.M))
        presets = root / "CMakePresets.json"
        listed = json.loads(presets.read_text())["configurePresets"] if presets.is_file() else []
        self.presets = {preset["name"] for preset in listed}
        self.variables = self.known_variables()

    def known_variables(self):
        found = set()
        for path in tree.files(self.root, ".hpp", ".cpp", ".cu", ".cmake", ".txt", ".py", ".json"):
            found.update(VARIABLE.findall(path.read_text(errors="replace")))
        for path in (self.root / "scripts").glob("*"):
            found.update(VARIABLE.findall(path.read_text()))
        return found

    def path_problem(self, document, name):
        """For what looks like a path of the tree; a name with a star must match something."""
        name = name.rstrip("/").removeprefix("./")
        if name.startswith(("build/", "/", "~")) or name in ("build", ""):
            return None
        for base in (self.root, document.parent):
            if (base / name).exists():
                return None
            if "*" in name and any(base.glob(name)):
                return None
        return f"{name} does not exist"

    def span_problem(self, document, text):
        """Inline code: a command, a path, or neither."""
        words = text.split()
        if len(words) > 1 or words[0].startswith("scripts/"):
            return self.command_problem(text)
        folders = {path.name for path in self.root.iterdir() if path.is_dir()}
        if "/" in text and PATH.match(text) and text.lstrip("./").split("/")[0] in folders:
            return self.path_problem(document, text)
        if SOURCE_NAME.match(text) and "*" not in text and text not in self.names:
            return f"no file is called {text}"
        return None

    def command_problem(self, line):
        """For one line of shell; unknown commands are nobody's business."""
        words = re.sub(r"^\$ |^\w+=\S+ ", "", line.strip()).split()
        if not words:
            return None
        command, arguments = words[0], words[1:]
        if command == "make":
            unknown = [a for a in arguments if re.match(r"^[a-z]", a) and a not in self.targets]
            return f"make has no target {unknown[0]}" if unknown else None
        if command in ("cmake", "ctest") and "--preset" in arguments:
            preset = arguments[arguments.index("--preset") + 1]
            return None if preset in self.presets else f"no preset is called {preset}"
        if command.startswith(("scripts/", "tools/")):
            return None if (self.root / command).is_file() else f"{command} does not exist"
        if command == "weft" or command.endswith("/weft"):
            return self.weft_problem(arguments)
        return None

    def weft_help(self, subcommand):
        if subcommand not in self.help_texts:
            shown = subprocess.run(
                [self.weft, *subcommand, "--help"], capture_output=True, text=True, timeout=30
            )
            self.help_texts[subcommand] = shown.stdout if shown.returncode == 0 else None
        return self.help_texts[subcommand]

    def weft_problem(self, arguments):
        if not self.weft:
            return None
        subcommand = tuple(a for a in arguments[:1] if re.match(r"^[a-z]+$", a))
        help_text = self.weft_help(subcommand)
        if help_text is None:
            return f"weft has no subcommand {subcommand[0]}"
        for argument in arguments:
            option = re.match(r"^--?[a-z][\w-]*", argument)
            if option and not re.search(rf"{re.escape(option.group())}(?![\w-])", help_text):
                return f"weft {' '.join(subcommand)} has no option {option.group()}"
        return None

    def quote_problem(self, marker, body):
        """The block's lines stand in the file in this order; '// ...' lines skip some of the file's."""
        name = marker.split()[1]
        path = self.root / name
        if not path.is_file():
            return f"{name} does not exist"
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
        place, may_skip = 0, True
        for line in filter(None, map(str.strip, body.splitlines())):
            if line.startswith("// ..."):
                may_skip = True
                continue
            end = len(lines) if may_skip else place + 1
            if line not in lines[place:end]:
                return f"{name} does not go on with: {line}"
            place = lines.index(line, place) + 1
            may_skip = False
        return None

    def findings_of(self, document):
        text = document.read_text()
        found = []
        for marker, language, body in FENCE.findall(text):
            if marker.startswith("quote"):
                found.append(self.quote_problem(marker, body))
            if language in SHELL:
                lines = body.replace("\\\n", " ").splitlines()
                found += [self.command_problem(line.split(" #")[0]) for line in lines]
        prose = FENCE.sub("", text)
        for link in LINK.findall(prose):
            if not link.startswith(("http:", "https:", "mailto:")):
                found.append(self.path_problem(document, link))
        found += [self.span_problem(document, span) for span in SPAN.findall(prose) if span.strip()]
        for variable in sorted(set(VARIABLE.findall(text)) - self.variables):
            found.append(f"nothing reads {variable}")
        place = document.relative_to(self.root)
        return [f"{place}: {problem}" for problem in found if problem]


def source_findings(root):
    findings = []
    for path in tree.files(root, ".hpp", ".cpp", ".cuh", ".cu", ".cmake", ".py"):
        for name in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text()):
            if not (root / name).is_file() and "tests" not in path.parts:
                findings.append(f"{path.relative_to(root)}: {name} does not exist")
    return findings


def run_blocks(root, documents):
    findings = []
    for document in documents:
        for marker, _, body in FENCE.findall(document.read_text()):
            if marker != "run":
                continue
            print(f"-- {document.relative_to(root)}\n{body}", flush=True)
            status = subprocess.run(["bash", "-euo", "pipefail", "-c", body], cwd=root).returncode
            if status != 0:
                findings.append(f"{document.relative_to(root)}: exit status {status} of:\n{body}")
    return findings


def main():
    parser = tree.parser(__doc__.splitlines()[0])
    parser.add_argument("--weft", help="the built program, to check its subcommands and options")
    parser.add_argument("--run", action="store_true", help="run the marked blocks instead")
    args = parser.parse_args()
    root = args.root.resolve()
    documents = tree.files(root, ".md")
    if args.run:
        findings = run_blocks(root, documents)
    else:
        checker = Checker(root, args.weft)
        findings = [finding for document in documents for finding in checker.findings_of(document)]
        findings += source_findings(root)
    return tree.report("check_docs", findings, f"{len(documents)} documents are true")


if __name__ == "__main__":
    sys.exit(main())
