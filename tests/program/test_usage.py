# SPDX-License-Identifier: Apache-2.0
"""Help, exit codes, bad options, pipes."""

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from conftest import LAB_COMMANDS, PROGRAM, TIMEOUT, clean_environment, one_error, weft

COMMANDS = ["info", "check", "limits", "bench", "plan", "tune"]


def test_help_lists_every_command():
    text = weft("--help").stdout
    for command in COMMANDS:
        assert f"\n  {command} " in text
    assert "Exit codes: 0 good, 1 a check failed or a run broke, 2 bad usage" in text


def test_the_program_holds_nothing_of_the_laboratory():
    text = weft("--help").stdout
    for command in LAB_COMMANDS:
        assert f"\n  {command} " not in text


@pytest.mark.parametrize("command", [*COMMANDS, *LAB_COMMANDS])
def test_help_of_a_command_teaches_by_examples(command):
    text = weft(command, "--help").stdout
    assert "Examples:" in text
    name = "weft-lab" if command in LAB_COMMANDS else "weft"
    assert f"{name} {command}" in text.split("Examples:")[1]


def test_version_is_that_of_the_sources():
    sources = (Path(__file__).parents[2] / "CMakeLists.txt").read_text()
    version = re.search(r"project\(weft VERSION ([\d.]+)", sources)[1]
    assert weft("--version").stdout == f"weft {version}\n"


def test_no_command_is_bad_usage():
    assert "subcommand is required" in one_error(weft(code=2))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["nonsense"], "nonsense"),
        (["run", "--", "true", "-q"], "python -m weft run"),
        (["stats", "run.json", "--html", "a.html"], "python -m weft stats"),
        (["plan", "--nonsense"], "--nonsense"),
        (["plan", "--layout", "diagonal"], '"diagonal" is not one of rank_major|expert_major'),
        (["plan", "--dtype", "int3"], '"int3" is not one of bf16|fp16|fp32'),
        (["plan", "--topk", "33"], "33"),
        (["plan", "--ranks", "0"], "0"),
        (["plan", "--tokens", "-1"], "-1"),
        (["plan", "--experts", "4", "--topk", "7"], "--topk 7"),
        (["plan", "--slots"], "--json"),
        (["plan", "--rank", "4", "--save", "x.json"], "--rank 4 is out of range"),
        (["bench", "--experts", "1"], "--experts 1 is not divisible by --ranks 4"),
        (["bench", "--experts", "4", "--topk", "7"], "--topk 7 is more than --experts 4"),
        (["bench", "--transport", "pigeon"], '"pigeon" is not one of auto, '),
        (["train"], "file"),
        (["train", "x", "--resume"], "--checkpoint"),
        (["train", "x", "--steps", "0"], "--steps"),
        (["train", "x", "--threads", "--processes"], "--threads"),
        (["train", "x", "--experts", "6"], "6"),
        (["train", "x", "--topk", "17"], "17"),
        (["train", "x", "--hidden", "3"], "3"),
        (["train", "x", "--dtype", "fp16"], "fp32|bf16"),
    ],
)
def test_bad_options_exit_with_2_and_say_which(args, expected):
    error = one_error(weft(*args, code=2))
    assert error.startswith("weft")
    assert expected in error
    assert "--help" in error


@pytest.mark.parametrize("args", [["info"], ["plan", "--tokens", "64"], ["plan", "--help"]])
def test_output_in_a_pipe_is_plain(args):
    done = weft(*args, TERM="xterm-256color")
    for text in (done.stdout, done.stderr):
        assert "\x1b" not in text
        assert "\r" not in text
    assert done.stderr == ""


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_streams_take_no_file_of_ours(tmp_path, closed):
    path = tmp_path / "plan.json"
    weft("plan", "--tokens", 8, "--save", path)
    before = path.read_bytes()
    for args in (["plan", path, "--compare", path], ["check", "--quick", "--ranks", 2, "--threads", "--only", "byte"]):
        command = " ".join([PROGRAM, *map(str, args), closed])
        done = subprocess.run(["sh", "-c", command], timeout=TIMEOUT, env=clean_environment())
        assert done.returncode == 0
    assert path.read_bytes() == before


def test_what_all_of_many_ranks_say_is_heard():
    error = one_error(weft("bench", "--smoke", "--ranks", 64, "--transport", "loopback", code=1))
    assert f"(so say ranks {', '.join(map(str, range(64)))})" in error


def test_no_line_ends_in_blanks():
    for line in weft("plan", "--tokens", "64").stdout.splitlines():
        assert line == line.rstrip()


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{PROGRAM} plan --tokens 64 | head -n 1"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=TIMEOUT, env=clean_environment()
    )
    assert done.returncode == 0
    assert done.stderr == ""


def test_info_on_a_terminal_ends_as_in_a_pipe():
    master, slave = pty.openpty()
    done = subprocess.run(
        [PROGRAM, "--version"], stdout=slave, stderr=slave, timeout=TIMEOUT, env=clean_environment()
    )
    os.close(slave)
    text = os.read(master, 4096).decode()
    os.close(master)
    assert done.returncode == 0
    assert text.startswith("weft 0.")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["limits", "--device", "cpu", "--seconds", "nan"], "nan is not a number from 0.001 to 10"),
        (["bench", "--skew", "nan"], "nan is not a number from 0 to 8"),
        (["train", __file__, "--balance", "nan"], "balance_weight = nan (finite, at least 0)"),
        (["train", __file__, "--batch", str(2**63 - 1)], "(at most 1073741824)"),
    ],
)
def test_numbers_that_are_none_or_too_large(args, expected):
    assert expected in one_error(weft(*args, code=2))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--hidden", 2**61], "--hidden: 2305843009213693952 is not a number from 1 to 1048576"),
        (["--hidden", 0], "--hidden: 0 is not a number from 1 to 1048576"),
        (["--experts", 2**31 - 1], "--experts: 2147483647 is not a number from 1 to 65536"),
        (["--seed", -1], "--seed: -1 is not a number from 0 to 18446744073709551615"),
        (["--tokens", "many"], "--tokens: many is not a number from 0 to 4194304"),
    ],
)
def test_a_number_out_of_bounds_is_told_with_its_bounds(args, expected):
    assert expected in one_error(weft("bench", *args, code=2))


def test_what_cannot_be_written_is_a_failure():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [PROGRAM, "info"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT, env=clean_environment()
        )
    assert done.returncode == 1 and "could not be written" in done.stderr
