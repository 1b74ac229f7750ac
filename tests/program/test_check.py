# SPDX-License-Identifier: Apache-2.0
"""`weft check`: passes on this machine, and fails when it should."""

import re

import pytest

from conftest import one_error, weft


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
    done = weft("check", "--quick", "--ranks", 2, "--transport", "loopback", code=1)
    assert "loopback cannot join these ranks: the ranks are not threads of one process" in one_error(done)
    assert done.stdout == ""
    error = one_error(weft("check", "--quick", "--transport", "pigeon", code=2))
    assert '"pigeon" is not one of auto, ' in error


def test_cases_can_be_picked_by_name():
    done = weft("check", "--quick", "--ranks", 2, "--only", "byte, padded")
    assert num_equal(done) == (2, 2)
    for word in ("expert_major byte", "expert_strided byte"):
        assert word in done.stdout
    assert "hard case" not in done.stdout and "float16" not in done.stdout
    assert '--only: no case is called "pigeons"' in one_error(weft("check", "--only", "pigeons", code=2))


def test_many_ranks_are_content_with_fewer_cases():
    equal, total = num_equal(weft("check", "--quick", "--ranks", 9, "--threads", "--only", "exact"))
    assert equal == total == 6  # layouts by the types that have code of their own


def test_bad_usage_is_told_apart():
    assert "--ranks" in weft("check", "--ranks", "many", code=2).stderr


def test_the_log_says_what_was_chosen():
    log = weft("check", "--quick", "--ranks", 2, "--transport", "shm", WEFT_LOG="debug").stderr
    said = "[rank 1/2] exchange: rank 1 of 2 on the CPU, transport shm, domains of 2 ranks"
    assert said in log
    assert "provider" not in log


def test_the_cpu_can_be_asked_for():
    done = weft("check", "--quick", "--ranks", 2, "--device", "cpu")
    assert done.stdout.startswith("2 ranks\n")
    assert "--device" in weft("check", "--device", "abacus", code=2).stderr
