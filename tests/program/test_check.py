# SPDX-License-Identifier: Apache-2.0
"""`weft check`: passes on this machine, and fails when it should."""

import re

import pytest

from conftest import weft


def num_equal(done):
    equal, total = re.search(r"(\d+) of (\d+) cases equal the reference", done.stdout).groups()
    return int(equal), int(total)


@pytest.mark.parametrize("how", ["--processes", "--threads"])
def test_quick_check_passes(how):
    done = weft("check", "--quick", "--ranks", 2, how)
    equal, total = num_equal(done)
    assert equal == total > 90
    assert "FAIL" not in done.stdout
    for word in ("rank_major float16", "one row short", "no tokens at all", "four plans alive"):
        assert word in done.stdout


def test_what_cannot_run_fails_with_its_reason():
    done = weft("check", "--quick", "--ranks", 2, "--transport", "pigeon", code=1)
    equal, total = num_equal(done)
    assert equal == 0 and total > 90
    # The same reason of all cases is told once.
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert re.match(rf"FAIL rank_major bfloat16, exact \(and {total - 1} more cases\): .*pigeon", line)


def test_cases_can_be_picked_by_name():
    done = weft("check", "--quick", "--ranks", 2, "--only", "byte, padded")
    assert num_equal(done) == (2, 2)
    for word in ("expert_major byte", "expert_strided byte"):
        assert word in done.stdout
    assert "hard case" not in done.stdout and "float16" not in done.stdout
    done = weft("check", "--quick", "--ranks", 2, "--only", "pigeons", code=1)
    assert 'no case is called "pigeons" (--only)' in done.stderr


def test_bad_usage_is_told_apart():
    assert "--ranks" in weft("check", "--ranks", "many", code=2).stderr


def test_the_cpu_can_be_asked_for():
    done = weft("check", "--quick", "--ranks", 2, "--device", "cpu")
    assert done.stdout.startswith("2 ranks\n")
    assert "--device" in weft("check", "--device", "abacus", code=2).stderr
