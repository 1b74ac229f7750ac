# SPDX-License-Identifier: Apache-2.0
"""`python -m weft`: the program that comes with the package, and `weft run` and `weft stats`, which
are Python. None of them imports torch."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        from weft import run

        sys.exit(run.main(sys.argv[2:]))
    if sys.argv[1:2] == ["stats"]:
        from weft.run import stats

        sys.exit(stats.main(sys.argv[2:]))
    module = find_spec("weft._core")
    if module is None:
        sys.exit(f"weft: {Path(__file__).parent} has no compiled module (install Weft again)")
    program = str(Path(__file__).with_name("program.py"))
    # -I and -S: nothing of the environment changes what runs.
    words = [sys.executable, "-I", "-S", program, module.origin, *sys.argv[1:]]
    os.execv(sys.executable, words)  # noqa: S606  (no shell is wanted)


if __name__ == "__main__":
    main()
