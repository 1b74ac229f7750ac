# SPDX-License-Identifier: Apache-2.0
"""`python -m weft`: the program that comes with the package, and `weft run`, which is Python."""

import os
import sys
from pathlib import Path


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        from weft import run

        sys.exit(run.main(sys.argv[2:]))
    program = Path(__file__).parent / "bin" / "weft"
    if not program.exists():
        sys.exit(f"weft: {program} is missing (the package was built without the program)")
    os.execv(program, ["weft", *sys.argv[1:]])  # noqa: S606  (no shell is wanted)


if __name__ == "__main__":
    main()
