# SPDX-License-Identifier: Apache-2.0
"""The benchmarks as programs: WEFT_BENCHES names those that are built here, one behind the other."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import TIMEOUT, clean_environment

BENCHES = {Path(path).name: path for path in os.environ.get("WEFT_BENCHES", "").split(":") if path}
WRITES = {
    "copy_bench": "--benchmark_out=",
    "plan_bench": "--benchmark_out=",
    "balance_bench": "--json=",
    "balance_plan_bench": "--json=",
    "order_bench": "--json=",
}
SKIPPED = 77  # nothing to measure here


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("name", BENCHES)
def test_closed_streams_take_nothing_of_ours(tmp_path, name, closed):
    path = tmp_path / "results.json"
    option = f"{WRITES[name]}{path}" if name in WRITES else ""
    command = f"{BENCHES[name]} --smoke {option} {closed}"
    done = subprocess.run(["sh", "-c", command], timeout=TIMEOUT, env=clean_environment())
    if done.returncode == SKIPPED:
        pytest.skip("nothing to measure here")
    assert done.returncode == 0
    if name in WRITES:
        json.loads(path.read_text())
