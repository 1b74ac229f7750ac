# SPDX-License-Identifier: Apache-2.0
"""`weft stats`: files of what processes have told, as text and as a page."""

import json
import re
import subprocess
import sys

import pytest

import weft
from weft.run import stats


def told(rank, waits, number=2):
    group = {"ranks": [4, 6, 7], "rank": rank, "wait_seconds": waits, "num_plans": 1}
    return {"calls": {"dispatch": number}, "groups": [group]}


RANKS = [told(0, [0.0, 0.5, 2.0]), told(1, [0.25, 0.0, 3.0]), told(2, [0.0, 0.25, 0.0])]
TEXT = """\
  dispatch             6
  3 ranks waited 6.00 s for each other, 5.00 s of them for rank 7
"""


def cells(page):
    return [float(one) for one in re.findall(r'<td style="[^"]*">([\d.]+)</td>', page)]


def test_files_of_ranks_and_one_file_of_all_tell_the_same(tmp_path, capsys):
    for rank, one in enumerate(RANKS):
        (tmp_path / f"{rank}.json").write_text(json.dumps(one))
    (tmp_path / "all.json").write_text(json.dumps(dict(zip("abc", RANKS))))
    pages = []
    for names in (["0.json", "1.json", "2.json"], ["all.json"]):
        out = tmp_path / "waits.html"
        assert stats.main([*(str(tmp_path / name) for name in names), "--html", str(out)]) == 0
        assert capsys.readouterr().out == "weft stats: 3 processes called Weft\n" + TEXT
        pages.append(out.read_text())
    for page in pages:
        assert cells(page) == [0.0, 0.5, 2.0, 0.25, 0.0, 3.0, 0.0, 0.25, 0.0]
        assert "5.00 s of them for rank 7." in page
        # The darkest is the longest wait.
        assert 'style="--share: 1.000">3.000<' in page
        assert page.count("--share: 1.000") == 1


def test_a_rank_that_was_two_processes_has_waited_for_both(tmp_path, capsys):
    file = tmp_path / "all.json"
    file.write_text(json.dumps(dict(zip("abcd", [*RANKS, told(1, [1.0, 0.0, 0.5], 1)]))))
    stats.main([str(file), "--html", str(tmp_path / "waits.html")])
    assert "waited 7.50 s for each other, 5.50 s of them for rank 7" in capsys.readouterr().out
    assert cells((tmp_path / "waits.html").read_text())[3:6] == [1.25, 0.0, 3.5]


def test_the_program_reads_what_weft_stats_returns(tmp_path):
    file = tmp_path / "own.json"
    file.write_text(json.dumps(weft.stats()))
    command = [sys.executable, "-m", "weft", "stats", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("weft stats: 1 process called Weft\n")


def test_nobody(tmp_path, capsys):
    (tmp_path / "none.json").write_text("{}")
    assert stats.main([str(tmp_path / "none.json")]) == 0
    assert capsys.readouterr().out == "weft stats: nobody called Weft\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "line 1 column 2"),
        ("[1]", "the whole = [1] (expected an object)"),
        ({"a": 3}, "a = 3 (expected an object with calls and groups)"),
        ({"a": {"calls": {}}}, "told.json: groups = null (expected a list)"),
        ({"calls": {"x": -1}, "groups": []}, "calls: x = -1 (expected 0 to 1e+18)"),
        ({"calls": {"x": True}, "groups": []}, "calls: x = true (expected 0 to 1e+18)"),
        ({"calls": {}, "groups": [{"ranks": [1, 1]}]}, "ranks = [1, 1] (expected different"),
        (told(3, [0.0] * 3), "rank = 3 (expected 0 to 2, a place among ranks)"),
        (told(0, [1.5]), "wait_seconds = [1.5] (expected 3 numbers, one a rank)"),
        (told(0, [0.0, -0.5, 0.0]), "wait_seconds = -0.5 (expected seconds, 0 to 1e+12)"),
        (told(0, [0.0, float("nan"), 0.0]), "wait_seconds = NaN (expected seconds, 0 to"),
        (told(0, [0.0, 10**400, 0.0]), "00... (expected seconds, 0 to 1e+12)"),
        ({"calls": {"x": 10**4299}, "groups": []}, "00... (expected 0 to 1e+18)"),
        ('{"calls": {"a\\u001b[2J": -1}, "groups": []}', "calls: a\\x1b[2J = -1 (expected"),
        ("[" * 200_000, "told.json: nested too deep"),
        (" " * ((1 << 26) + 1), "told.json: more than 64 MiB"),
        ("\udcff", "can't decode byte"),
    ],
)
def test_what_cannot_be_shown_is_named(tmp_path, capsys, content, message):
    file = tmp_path / "told.json"
    if content is not None:
        content = content if isinstance(content, str) else json.dumps(content)
        file.write_text(content, errors="surrogateescape")
    with pytest.raises(SystemExit) as end:
        stats.main([str(file)])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "told.json" in error and message in error


def test_a_page_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "own.json").write_text(json.dumps(RANKS[0]))
    with pytest.raises(SystemExit) as end:
        stats.main([str(tmp_path / "own.json"), "--html", "/no/such/folder/a"])
    assert end.value.code == 2
    assert "/no/such/folder/a cannot be written" in capsys.readouterr().err


def test_names_change_no_terminal_and_can_be_encoded(tmp_path, capsys):
    named = {"\x1b[2J\x1b]0;mine\x07": 2, "\ud800\n": 1, "größe": 3}
    (tmp_path / "own.json").write_text(json.dumps({"calls": named, "groups": []}))
    assert stats.main([str(tmp_path / "own.json"), "--html", str(tmp_path / "\x1b.html")]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert names == ["größe", "\\x1b[2J\\x1b]0;mine\\x07", "\\ud800\\n"]
    assert "<th>\\ud800\\n</th>" in (tmp_path / "\x1b.html").read_text(encoding="utf-8")


def test_output_that_cannot_be_written(tmp_path):
    (tmp_path / "own.json").write_text(json.dumps(RANKS[0]))
    command = [sys.executable, "-m", "weft", "stats", str(tmp_path / "own.json")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr.endswith("error: stdout cannot be written: No space left on device\n")
