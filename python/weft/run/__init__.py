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

from weft.run import calls, page, stats

NAMES = ("deep_ep", "nixl_ep", "uccl")
FOLDERS = Path(__file__).parent / "names"  # by name: its module, and its distribution
_HANDED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_OF_TERMINALS = (signal.SIGINT, signal.SIGQUIT)
_PLUGIN = "WEFT_RUN_AS"  # the environment variable with the names, for `vllm_plugin`

_EXAMPLES = """examples:
  weft run -- vllm serve MODEL --enable-expert-parallel --all2all-backend deepep_low_latency
  weft run --as deep_ep -- torchrun --nproc-per-node 8 pretrain_gpt.py ...

Exits as the command does. Interpreters that ignore PYTHONPATH (python -I, -E) are not reached."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command of the arguments and returns its exit code, whatever becomes of the report;
    128 + the number of the signal that ended it, 127 if there is no such program, 126 if it cannot
    be run, 2 if nothing can be recorded."""
    options = _parse(arguments)
    name = options.command[0]
    program = shutil.which(name)
    if program is None:
        _say(f"weft run: '{page.shown(name)}' not found (neither a file nor in PATH)")
        return 127
    try:
        folder = tempfile.mkdtemp(prefix="weft_run_")
    except OSError as error:
        _say(f"weft run: no folder for what processes tell: {error}")
        return 2
    try:
        status = _status_of([program, *options.command[1:]], _environment(options.names, folder))
        found = _read(Path(folder))
    except OSError as error:  # it was not started
        _say(f"weft run: '{page.shown(name)}' cannot be run: {error.strerror}")
        return 126
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json is not None:
        _write(options.json, json.dumps(found, indent=1) + "\n")
    if options.html is not None:
        _write(options.html, page.page(found, f"weft run: {' '.join(options.command)}"))
    _say(report(found, options.names))
    return status


def _write(path: Path, text: str) -> None:
    """A report that cannot be written does not hide how the command has ended."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        _say(f"weft run: {page.shown(str(path))} cannot be written: {error.strerror}")


def _say(text: str) -> None:
    """On stderr, where there is one that can be written to."""
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = None  # what is left in it would fail again at the end, with another exit code


def report(found: dict[str, Any], names: Sequence[str]) -> str:
    """Makes the report of `weft.stats` by process."""
    first, *more = page.lines(found)
    names_asked = "" if found else f" (as {' or '.join(names)})"
    return "\n".join([f"weft run: {first}{names_asked}", *more])


def vllm_plugin() -> None:
    """Installs Weft's names. vLLM calls it in each of its processes, also where they have lost
    PYTHONPATH. Outside `weft run` it does nothing."""
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
            parser.error(f"{page.shown(str(path))} cannot be written: {error.strerror}")
    return options


def _environment(names: Sequence[str], counts: str) -> dict[str, str]:
    paths = [str(FOLDERS / name) for name in names]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    chosen = {calls.FOLDER: counts, _PLUGIN: ",".join(names), "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **chosen}


def _status_of(command: list[str], environment: dict[str, str]) -> int:
    """Runs the command to its end; returns its status. Passes on signals, but not those that a
    terminal sends to it anyway. OSError: cannot start."""
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def hand_on(number: int, _: Any) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    # Functions, for what is ignored stays ignored in the command. So does what is ignored by now.
    handlers = dict.fromkeys(_HANDED_ON, hand_on) | dict.fromkeys(_OF_TERMINALS, lambda *_: None)
    usual = {n: h for n in handlers if (h := signal.getsignal(n)) not in (None, signal.SIG_IGN)}
    for number in usual:
        signal.signal(number, handlers[number])
    try:
        with subprocess.Popen(command, env=environment) as child:
            for number in early:
                child.send_signal(number)
            status = child.wait()
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status


def _read(folder: Path) -> dict[str, Any]:
    """Returns what processes have told, by the number of the process. What a killed one left half
    written has another suffix, and what cannot be read is left out."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        try:
            (told,) = stats.read(file).values()
            found[file.stem] = {**told, "calls": told["calls"] | calls.read(file)}
        except (OSError, ValueError) as error:
            _say(f"weft run: {file.name}: {error}")
    return found
