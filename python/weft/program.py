# SPDX-License-Identifier: Apache-2.0
"""The program `weft`, which the compiled module holds: `python program.py MODULE WORD ...`.

It runs in an interpreter of its own without torch, for it forks, measures and takes signals.
"""

import signal
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader


def main(path: str, *words: str) -> None:
    loader = ExtensionFileLoader("_core", path)
    core = module_from_spec(spec_from_loader("_core", loader))
    loader.exec_module(core)
    if not hasattr(core, "run_program"):
        sys.exit(f"weft: {path} was built without the program")
    # Default handlers, as in a process that Python did not start.
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    sys.exit(core.run_program(["weft", *words]))


if __name__ == "__main__":
    main(*sys.argv[1:])
