# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools/check_commit.py"


def check(message):
    done = subprocess.run([sys.executable, TOOL], input=message, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "message",
    [
        "dispatch: keep kernel arguments alive\n\nThe stream may still read them.\n",
        "cuda, tests: open comments with a subject\n\nNo code changed.\n# of git\n",
        'Revert "dispatch: keep kernel arguments alive"\n',
    ],
)
def test_accepts(message):
    assert check(message) == (0, "check_commit: 1 messages say what and why\n")


@pytest.mark.parametrize(
    "message, problem",
    [
        ("Keep kernel arguments alive\n\nWhy.\n", 'expected "component: imperative"'),
        ("dispatch: Keep them\n\nWhy.\n", 'expected "component: imperative"'),
        (f"dispatch: keep {'x' * 60}\n\nWhy.\n", "subject of 75 characters (at most 72)"),
        ("dispatch: keep them\nWhy.\n", "no blank line"),
        ("dispatch: keep them\n", "no body"),
        ("", "expected"),
    ],
)
def test_refuses(message, problem):
    status, out = check(message)
    assert status == 1 and problem in out
