# SPDX-License-Identifier: Apache-2.0
"""`weft plan` against the reference in NumPy, and what it saves, compares and draws."""

import json
import random
import re

import numpy as np
import pytest

from conftest import TINY, one_error, weft
from reference_plan import reference_plan

SEED = random.SystemRandom().randrange(1 << 30)

LAYOUTS = {
    "expert_major": ["--layout", "expert_major"],
    "expert_major padded": ["--layout", "expert_major", "--pad", "8"],
    "expert_major short of room": ["--layout", "expert_major", "--pad", "4", "--budget", "40"],
    "expert_major with room to spare": ["--layout", "expert_major", "--budget", "5000"],
    "rank_major": ["--layout", "rank_major"],
    "rank_major short of room": ["--layout", "rank_major", "--budget", "30"],
    "expert_strided": ["--layout", "expert_strided"],
    "expert_strided padded": ["--layout", "expert_strided", "--pad", "16"],
    "expert_strided short of room": ["--layout", "expert_strided", "--stride", "5"],
}


def planned(*args):
    return json.loads(weft("plan", *args, "--json", "--slots").stdout)


def options_of(args):
    pairs = dict(zip(args[::2], args[1::2]))
    return {
        "layout": pairs["--layout"],
        "pad": int(pairs.get("--pad", 1)),
        "stride": int(pairs.get("--stride", 0)),
        "budget": int(pairs["--budget"]) if "--budget" in pairs else None,
    }


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_slots_equal_the_reference_bit_for_bit(name, ranks):
    args = LAYOUTS[name]
    print("seed", SEED)
    made_up = ["--ranks", ranks, "--tokens", 57, "--experts", 12, "--topk", 3, "--skew", 1]
    report = planned(*made_up, "--seed", SEED, *args)
    tables = [np.array(r["topk_idx"]).reshape(-1, 3) for r in report["ranks"]]
    expected = reference_plan(tables, 12, **options_of(args))
    for got, want in zip(report["ranks"], expected):
        assert got["route_slots"] == want["route_slots"]
        assert got["num_rows"] == want["num_rows"]
        assert got["rows_per_expert"] == want["rows_per_expert"]
        if options_of(args)["layout"] != "rank_major":
            assert got["expert_begin"] == want["expert_begin"]
    received = np.array([plan["arrivals_from"] for plan in expected])
    sent = np.array(report["sent_bytes"]).reshape(ranks, ranks)
    assert (sent == received.T * report["row_bytes"]).all()
    assert any(r["overflow"] for r in report["ranks"]) == any(p["drops"] for p in expected)


def test_bytes_and_imbalance_follow_from_the_routes():
    report = planned("--ranks", 2, "--tokens", 100, "--experts", 8, "--topk", 2, "--hidden", 64)
    routes = np.array(report["routes_per_expert"])
    assert report["row_bytes"] == 128
    assert routes.sum() == report["num_routes"] == 400
    assert report["imbalance_experts"] == pytest.approx(routes.max() / routes.mean())
    per_rank = routes.reshape(2, 4).sum(axis=1)
    assert report["imbalance_ranks"] == pytest.approx(per_rank.max() / per_rank.mean())
    sent = np.array(report["sent_bytes"]).reshape(2, 2)
    for rank in report["ranks"]:
        assert rank["wire_bytes"] == sent[rank["rank"], 1 - rank["rank"]]
        assert rank["logical_bytes"] == sum(rank["rows_per_expert"]) * 128


def test_no_tokens_at_all_is_a_plan():
    report = planned("--ranks", 2, "--tokens", 0, "--experts", 4, "--topk", 2)
    assert report["num_routes"] == 0
    assert [r["num_rows"] for r in report["ranks"]] == [0, 0]
    assert "0 routes" in weft("plan", "--ranks", 2, "--tokens", 0, "--experts", 4, "--topk", 2).stdout


def test_the_same_seed_gives_the_same_routing():
    args = ["--tokens", 64, "--seed", SEED]
    assert planned(*args) == planned(*args)


def test_text_has_a_line_per_rank_and_a_picture():
    text = weft("plan", "--tokens", 64, "--skew", 1).stdout
    for rank in range(4):
        assert re.search(rf"^ +{rank} +64 ", text, re.MULTILINE)
        assert re.search(rf"^  rank +{rank} \|[ .:\-=+*#%@]{{64}}\|$", text, re.MULTILINE)
    assert "Imbalance, max / mean" in text


def test_a_saved_plan_is_read_described_and_equal_to_itself(tmp_path):
    path = tmp_path / "one.json"
    args = ["--tokens", 64, "--seed", SEED]
    weft("plan", *args, "--rank", 1, "--save", path)
    assert "plan of rank 1/4" in weft("plan", path).stdout
    assert weft("plan", path, "--json").stdout == path.read_text()
    assert "equal" in weft("plan", path, "--compare", path).stdout
    assert "equal" in weft("plan", *args, "--rank", 1, "--compare", path).stdout


def test_a_saved_plan_is_what_it_is(tmp_path):
    path = tmp_path / "one.json"
    weft("plan", "--tokens", 8, "--save", path)
    for option in (["--html", tmp_path / "page.html"], ["--layout", "rank_major"], ["--rank", 1]):
        error = one_error(weft("plan", path, *option, code=2))
        assert f"{option[0]} is for a routing, and {path} is a saved plan" in error
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_is_no_routing_file():
    error = one_error(weft("plan", "/dev/stdin", stdin="{}", code=1))
    assert "/dev/stdin is not a file of a disk" in error


def test_plans_that_differ_exit_with_1_and_say_where(tmp_path):
    path = tmp_path / "one.json"
    weft("plan", "--tokens", 64, "--seed", 1, "--save", path)
    text = weft("plan", "--tokens", 64, "--seed", 2, "--compare", path, code=1).stdout
    assert re.search(r"^topk_idx\[\d+\]: \d+ and \d+$", text, re.MULTILINE)
    text = weft("plan", "--tokens", 65, "--seed", 1, "--compare", path, code=1).stdout
    assert "num_tokens: 65 and 64" in text


def test_page_is_whole_and_needs_nothing_else(tmp_path):
    page = tmp_path / "plan.html"
    weft("plan", "--tokens", 64, "--pad", 16, "--html", page)
    text = page.read_text()
    assert text.count("<svg") == text.count("</svg>") == 3
    assert text.rstrip().endswith("</html>")
    assert "src=" not in text and "<script" not in text and "<link" not in text
    assert list(tmp_path.iterdir()) == [page]


def test_replicas_make_ranks_even_and_their_weights_are_counted(tmp_path):
    args = ["--ranks", 8, "--tokens", 300, "--experts", 32, "--topk", 4, "--skew", 1.5, "--seed", SEED]
    print("seed", SEED)
    page = tmp_path / "plan.html"
    report = planned(*args, "--balance", 3, "--expert-bytes", 1000, "--html", page)
    balance = report["balance"]
    mean = report["num_routes"] / 8
    assert [outcome["replicas"] for outcome in balance["outcomes"]] == [0, 1, 2, 3, 4]
    busiest = [outcome["busiest_rows"] for outcome in balance["outcomes"]]
    # More replicas need not make ranks evener still: the search is greedy.
    assert max(busiest) == busiest[0] > busiest[3] >= mean
    for outcome in balance["outcomes"]:
        assert outcome["imbalance_ranks"] == pytest.approx(outcome["busiest_rows"] / mean)
        assert outcome["moved_bytes"] == 1000 * outcome["copies"] <= 8000 * outcome["replicas"]
    rows = np.array(report["routes_per_expert"]).reshape(8, 4).sum(axis=1)
    assert busiest[0] == rows.max()
    for copy in balance["copies"]:  # where they went, ranks have as many rows as was said
        assert copy["from"] == copy["expert"] // 4 != copy["to"]
        rows[copy["from"]] -= copy["rows"]
        rows[copy["to"]] += copy["rows"]
    assert busiest[3] == rows.max()
    assert len(balance["copies"]) == balance["outcomes"][3]["copies"]
    text = weft("plan", *args, "--balance", 3, "--expert-bytes", 1000).stdout
    assert "Balanced with up to 3 replicas a rank" in text
    assert re.search(rf"^ +3 +{busiest[3]:,} +\d\.\d{{3}} ", text, re.MULTILINE)
    assert f"{busiest[3]:,}" in page.read_text()


def test_a_replica_has_its_fewest_rows():
    print("seed", SEED)
    args = ["--tokens", 300, "--experts", 32, "--skew", 1.5, "--seed", SEED, "--balance", 4]
    smallest = min(copy["rows"] for copy in planned(*args)["balance"]["copies"])
    copies = planned(*args, "--min-rows", smallest + 1)["balance"]["copies"]
    assert all(copy["rows"] > smallest for copy in copies)
    assert planned(*args, "--min-rows", 1_000_000)["balance"]["copies"] == []


def test_numbers_of_balancing_have_bounds(tmp_path):
    assert "--balance: 17 is not a number from 0 to 16" in one_error(weft("plan", "--balance", 17, code=2))
    assert "--min-rows: 0 is not a number from 1" in one_error(weft("plan", "--balance", 1, "--min-rows", 0, code=2))
    error = one_error(weft("plan", "--balance", 1, "--expert-bytes", 0, code=2))
    assert "--expert-bytes: 0 is not a number from 1 to 1099511627776" in error
    assert "--balance" in one_error(weft("plan", "--min-rows", 2, code=2))
    path = tmp_path / "one.json"
    weft("plan", "--tokens", 8, "--save", path)
    assert "--balance is for a routing" in one_error(weft("plan", path, "--balance", 1, code=2))


def test_experts_that_ranks_cannot_share_are_refused():
    error = one_error(weft("plan", "--experts", 10, "--ranks", 4, "--tokens", 8, code=2))
    assert "--experts 10" in error and "4" in error


def test_real_routing_of_a_training_run_is_read(tmp_path, book):
    steps = tmp_path / "steps.wrt"
    weft("train", book, *TINY, "--ranks", 2, "--steps", 3, "--save-routing", steps)
    text = weft("plan", steps).stdout
    assert "step 3, layer 0" in text
    report = planned(steps, "--step", 2, "--layer", 1)
    assert report["num_ranks"] == 2
    assert report["num_experts"] == 4
    assert report["num_routes"] == 32 * 2
    assert "step 2, layer 1" in report["source"]
    error = one_error(weft("plan", steps, "--step", 7, code=1))
    assert "no record of step 7 (steps 1 to 3)" in error
