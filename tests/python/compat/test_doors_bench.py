# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the drop-ins' calls, on CPU tensors: every call is made and has its row."""

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[3] / "bench/doors_bench.py"
LOW_LATENCY = {"ll_dispatch", "ll_combine", "ll_dispatch+combine"}
NORMAL = {"v1_dispatch", "v1_dispatch_cached", "v1_combine", "hybrid_dispatch", "hybrid_combine"}
FUSED = {"fused_dispatch", "fused_combine", "hybrid_ep_dispatch", "hybrid_ep_combine"}


def test_every_call_has_its_row(tmp_path):
    path = tmp_path / "doors.json"
    options = ["--device", "cpu", "--cases", "small", "--rounds", "2", "--json", str(path)]
    run = subprocess.run([sys.executable, BENCH, *options], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = json.loads(path.read_text())["rows"]
    eager = [row for row in rows if row["mode"] == "eager"]
    assert {row["op"] for row in eager} == LOW_LATENCY | NORMAL | FUSED
    formats = {row["dtype"] for row in eager if row["op"] == "ll_dispatch"}
    assert formats == {"bfloat16", "fp8", "ue8m0", "mxfp8", "nvfp4"}
    assert all(row["host_us_p50"] > 0 for row in eager)
    first = [row for row in rows if row["mode"] == "first"]
    assert {row["op"] for row in first} == {
        row["op"] for row in eager if "dispatch" in row["op"]
    } - {"v1_dispatch_cached"}
    assert all(row["held_bytes"] > 0 for row in first)
