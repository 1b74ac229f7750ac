# SPDX-License-Identifier: Apache-2.0
"""The benchmark of relays: every way of sending has its row."""

import importlib.util
from pathlib import Path

import torch

BENCH = Path(__file__).resolve().parents[3] / "bench/relays_bench.py"


def measured(rank, num_ranks, group):
    spec = importlib.util.spec_from_file_location("relays_bench", BENCH)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    return bench.measure(3, 40, ["never", "always", "auto"], 2, torch.device("cpu"))


def test_every_mode_has_its_row(ranks):
    rows = ranks(measured, 4)[0]
    told = [(row["mode"], row["rounds"], row["busiest_bytes"]) for row in rows]
    assert told == [("never", 1, 3 * 80), ("always", 2, 2 * 80), ("auto", 1, 3 * 80)]
    assert all(0 < row["us_p50"] <= row["us_p99"] for row in rows)
    assert all(row["busiest_crossing_bytes"] == 0 and row["domains"] == 1 for row in rows)
