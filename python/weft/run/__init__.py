# SPDX-License-Identifier: Apache-2.0
"""`weft run -- COMMAND`: a program written for deep_ep, nixl_ep or uccl, over Weft, unchanged.

Every Python process below the command finds Weft under the chosen names: a folder with modules of
those names is the first in PYTHONPATH. What Weft was called for is told at the end.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.run import calls, page

NAMES = ("deep_ep", "nixl_ep", "uccl")
_FOLDERS = Path(__file__).parent / "names"
_PLUGIN = "WEFT_RUN_AS"  # the environment variable with the names, for `vllm_plugin`

_EXAMPLES = """examples:
  weft run -- vllm serve MODEL --enable-expert-parallel --all2all-backend deepep_low_latency
  weft run --as deep_ep -- torchrun --nproc-per-node 8 pretrain_gpt.py ...

Exits as the command does. Interpreters that ignore PYTHONPATH (python -I, -E) are not reached."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command of the arguments and returns its exit code, 127 if there is no such
    program, 128 + the number of the signal that ended it."""
    options = _parse(arguments)
    name = options.command[0]
    program = shutil.which(name)
    if program is None:
        print(f"weft run: '{name}' not found (neither a file nor in PATH)", file=sys.stderr)
        return 127
    with tempfile.TemporaryDirectory(prefix="weft_run_") as folder:
        environment = _environment(options.names, folder)
        status = _status_of([program, *options.command[1:]], environment)
        found = _read(Path(folder))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.html is not None:
        options.html.write_text(page.page(found, f"weft run: {' '.join(options.command)}"))
    print(report(found, options.names), file=sys.stderr)
    return status


def report(found: dict[str, Any], names: Sequence[str]) -> str:
    """found: by process, what it has told (`weft.stats`)."""
    first, *more = page.lines(found)
    names_asked = "" if found else f" (as {' or '.join(names)})"
    return "\n".join([f"weft run: {first}{names_asked}", *more])


def vllm_plugin() -> None:
    """What vLLM calls in each of its processes, also where they have lost PYTHONPATH. It does
    nothing but below `weft run`."""
    names = os.environ.get(_PLUGIN)
    if names:
        from weft.compat import install

        install(names.split(","), force=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="weft run",
        description="Runs a program whose Python processes then find Weft under other names.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--as",
        dest="names",
        metavar="NAMES",
        default=",".join(NAMES),
        help=f"what Weft stands for, of {', '.join(NAMES)} (all of them)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write what each process told here"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page of who waited for whom here"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and what to run")
    options = parser.parse_args(arguments)
    options.names = options.names.split(",")
    for name in options.names:
        if name not in NAMES:
            parser.error(f"--as: '{name}' is unknown (expected some of {', '.join(NAMES)})")
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        parser.error("there is no command (weft run -- COMMAND ...)")
    for path in filter(None, (options.json, options.html)):
        try:
            path.open("a").close()  # before hours of work, not after them
        except OSError as error:
            parser.error(f"{path} cannot be written: {error.strerror}")
    return options


def _environment(names: Sequence[str], counts: str) -> dict[str, str]:
    paths = [str(_FOLDERS / name) for name in names]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    chosen = {calls.FOLDER: counts, _PLUGIN: ",".join(names), "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **chosen}


def _status_of(command: list[str], environment: dict[str, str]) -> int:
    """A terminal sends Ctrl-C to the command, too; SIGTERM is passed on. Both wait for its end."""
    with subprocess.Popen(command, env=environment) as child:
        usual = {
            signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: child.terminate()),
        }
        try:
            status = child.wait()
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)
    return 128 - status if status < 0 else status


def _read(folder: Path) -> dict[str, Any]:
    """By the number of the process. What a killed one left half written has another suffix."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
