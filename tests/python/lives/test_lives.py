# SPDX-License-Identifier: Apache-2.0
"""Random lives of ranks (see __main__.py) on CPUs: a share of them for every change."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def lives(*options: str) -> str:
    run = [sys.executable, str(HERE), *options]
    made = subprocess.run(run, capture_output=True, text=True, timeout=300)
    return made.stdout[-4000:] + made.stderr[-4000:]


def test_ten_thousand_steps_are_right():
    """A busy machine makes as many of the steps as it can in the time that this test has."""
    said = lives("--total", "10000", "--limit", "40")
    assert "all right" in said, said


def test_a_life_that_goes_wrong_names_its_seed_and_fails_again_by_it():
    """A wrong result is put in by hand; fewer steps are found that show it."""
    given = ("--seed", "3", "--steps", "40", "--ranks", "2", "--kind", "steady", "--wrong", "30")
    said = lives(*given)
    assert "step 30 failed on rank" in said and "--seed 3 --steps 31 --ranks 2" in said, said
    said = lives(*given, "--shorten")
    assert "--only 30 --ranks 2" in said, said


def test_ranks_die_and_return():
    said = lives("--total", "800", "--limit", "20", "--kind", "mortal", "--ranks", "3")
    assert "all right" in said, said
