# SPDX-License-Identifier: Apache-2.0
"""`weft bench`: its table, its file and its page."""

import json

import pytest

from conftest import TINY, one_error, weft

HEADER = ["commit", "dirty", "date", "machine", "gpus", "driver", "cuda", "limit_gbps", "gather_gbps", "rows"]
ROW = [
    *["op", "executor", "transport", "layout", "dtype", "ranks", "tokens", "hidden", "experts", "topk"],
    *["pad", "sms", "mode", "us_p50", "us_p99", "wire_bytes", "logical_bytes", "limit_us"],
    *["percent_of_limit", "checked"],
]
OPS = ["plan", "dispatch", "combine", "plan+dispatch"]


def bench(tmp_path, *args):
    path = tmp_path / "out.json"
    weft("bench", "--smoke", "--ranks", 2, "--json", path, *args)
    return json.loads(path.read_text())


def test_the_file_has_exactly_the_documented_fields(tmp_path):
    results = bench(tmp_path)
    assert list(results) == HEADER
    assert [row["op"] for row in results["rows"]] == OPS
    for row in results["rows"]:
        assert list(row) == ROW
        assert row["checked"] is True
        assert 0 < row["us_p50"] <= row["us_p99"]
        assert row["ranks"] == 2 and row["executor"] == "cpu" and row["transport"] == "shm"


def test_bytes_and_limit_follow_their_formulas(tmp_path):
    case = ["--layout", "rank_major", "--experts", 2, "--topk", 2, "--hidden", 128, "--tokens", 32]
    results = bench(tmp_path, *case)  # every token meets both ranks
    row_bytes = 2 * 128
    for row in results["rows"][1:]:
        assert row["logical_bytes"] == 2 * 2 * 32 * row_bytes
        assert row["wire_bytes"] == 2 * 32 * row_bytes
        rate = results["gather_gbps" if row["op"] == "combine" else "limit_gbps"]
        assert row["limit_us"] == pytest.approx(128 * row_bytes / rate / 1e3, rel=1e-2, abs=2e-3)
        percent = min(100, 100 * row["limit_us"] / row["us_p50"])
        assert row["percent_of_limit"] == pytest.approx(percent, rel=0.05)


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "expert_strided"])
@pytest.mark.parametrize("how", ["--staged", "--threads"])
def test_every_layout_is_checked_before_it_is_timed(tmp_path, layout, how):
    results = bench(tmp_path, "dispatch", "combine", "--layout", layout, "--dtype", "fp16", how)
    assert [row["op"] for row in results["rows"]] == ["dispatch", "combine"]
    assert all(row["checked"] for row in results["rows"])
    assert results["rows"][0]["mode"] == ("exact staged" if how == "--staged" else "exact direct")


def test_the_page_has_plots_and_the_table(tmp_path):
    page = tmp_path / "out.html"
    table = weft("bench", "--smoke", "--ranks", 2, "--html", page).stdout
    html = page.read_text()
    assert html.count("<svg") == 3
    for op in OPS:
        assert op in table and op in html


def test_real_routing_decides_the_case(tmp_path, book):
    routing = tmp_path / "run.routing"
    weft("train", book, *TINY, "--ranks", 2, "--steps", 3, "--save-routing", routing)
    path = tmp_path / "out.json"
    weft("bench", "dispatch", "--routing", routing, "--hidden", 64, "--iterations", 3, "--json", path)
    row = json.loads(path.read_text())["rows"][0]
    assert (row["ranks"], row["tokens"], row["experts"], row["topk"]) == (2, 16, 4, 2)
    assert row["checked"] is True


def test_foreign_routing_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "foreign"
    path.write_text("this is no routing file, only some text that is long enough to be one")
    assert "foreign" in one_error(weft("bench", "--routing", path, code=1))


@pytest.mark.parametrize(
    "args, problem",
    [
        (["--device", "cpu"], "--copy-engines: GPUs have them, and this would run on the CPU"),
        (["--graph"], "--graph excludes --copy-engines"),
        (["--staged"], "--staged excludes --copy-engines"),
    ],
)
def test_copy_engines_that_cannot_be_are_refused(args, problem):
    assert problem in weft("bench", "--smoke", "--copy-engines", *args, code=2).stderr


@pytest.mark.parametrize(
    "args, problem",
    [
        (["--case", "D", "--hidden", "64"], "--hidden excludes --case"),
        (["--case", "D", "--smoke"], "--case excludes --smoke"),
        (["--routing", __file__, "--topk", "2"], "--routing excludes --topk"),
        (["--routing", __file__, "--case", "A"], "--routing excludes --case"),
        (["--sms", "8", "16"], "16 not in"),
    ],
)
def test_what_would_be_ignored_is_refused(args, problem):
    assert problem in one_error(weft("bench", *args, code=2))


def test_smoke_leaves_alone_what_is_asked_for(tmp_path):
    row = bench(tmp_path, "plan", "--tokens", 300)["rows"][0]
    assert (row["tokens"], row["hidden"]) == (300, 256)


def test_copy_engines_have_rows_of_their_own(tmp_path):
    if len(json.loads(weft("info", "--json").stdout)["gpus"]["list"]) < 2:
        pytest.skip("needs two GPUs")
    path = tmp_path / "out.json"
    weft("bench", "--smoke", "--ranks", 2, "--copy-engines", "--json", path)
    rows = json.loads(path.read_text())["rows"]
    assert {row["mode"] for row in rows} == {"exact copies"}
    assert all(row["checked"] for row in rows)


def test_wrong_words_are_bad_usage():
    assert "float8" in weft("bench", "--dtype", "float8", code=2).stderr
    assert "gather" in weft("bench", "gather", code=2).stderr
