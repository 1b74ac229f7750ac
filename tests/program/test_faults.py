# SPDX-License-Identifier: Apache-2.0
"""A rank is killed: the others end with an error that names it, and nothing stays behind."""

import glob
import os
import signal
import time

import pytest

from conftest import TIMEOUT, TINY, start, weft


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return sorted(map(int, file.read().split()))


def shared_files():
    """Names in /dev/shm, and processes of this program that hold memory without a name."""
    return set(os.listdir("/dev/shm"))


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def holders_of_memory(pids):
    """Returns (process, link) of each memfd that one of the processes still holds."""
    found = []
    for pid in pids:
        for link in glob.glob(f"/proc/{pid}/fd/*"):
            try:
                if "memfd:" in os.readlink(link):
                    found.append((pid, link))
            except OSError:
                pass
    return found


def train_until_it_runs(tmp_path, book, *args):
    kept = tmp_path / "model.ckpt"
    process = start(
        "train", book, *TINY, "--ranks", 4, "--seconds", 300,
        "--checkpoint", kept, "--checkpoint-every", 2, *args,
    )
    end = time.monotonic() + TIMEOUT
    while not kept.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)
    return process, kept


@pytest.mark.parametrize("victim, args", [(0, []), (2, []), (2, ["--overlap", "--delay-wgrad"])])
def test_a_killed_rank_ends_the_others_with_an_error_that_names_it(tmp_path, book, victim, args):
    before = shared_files()
    process, kept = train_until_it_runs(tmp_path, book, *args)
    ranks = children_of(process.pid)
    assert len(ranks) == 4
    assert holders_of_memory(ranks)
    os.kill(ranks[victim], signal.SIGKILL)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1
    assert f"rank {victim} was ended by signal 9 (Killed)" in err
    others = [line for line in err.splitlines() if "was ended by" not in line]
    assert any(f"rank {victim}" in line for line in others), err
    assert not any(alive(pid) for pid in ranks)
    assert not holders_of_memory(ranks)
    assert shared_files() == before
    # The checkpoint on the disk is whole.
    steps = ["--resume", "--seconds", 0.1]
    weft("train", book, *TINY, "--ranks", 4, "--checkpoint", kept, *steps)


def test_ranks_end_when_the_program_is_killed(tmp_path, book):
    before = shared_files()
    process, _ = train_until_it_runs(tmp_path, book)
    ranks = children_of(process.pid)
    process.kill()
    process.communicate(timeout=TIMEOUT)
    end = time.monotonic() + TIMEOUT
    while any(alive(pid) for pid in ranks):
        assert time.monotonic() < end, "ranks outlive the program"
        time.sleep(0.01)
    assert shared_files() == before


def test_an_error_that_all_ranks_share_is_said_once(tmp_path, book):
    missing = tmp_path / "nowhere.ckpt"
    args = ["train", book, *TINY, "--ranks", 4, "--steps", 1, "--checkpoint", missing, "--resume"]
    err = weft(*args, code=1).stderr
    assert len(err.splitlines()) == 1
    assert str(missing) in err


def test_nothing_stays_in_shared_memory_after_a_good_run(book):
    before = shared_files()
    weft("train", book, *TINY, "--ranks", 4, "--steps", 2)
    assert shared_files() == before
