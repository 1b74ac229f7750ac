# SPDX-License-Identifier: Apache-2.0
"""The example as a user runs it."""

import os
import subprocess
import sys

import pytest


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )


ARGUMENTS = ("--tokens", "64", "--hidden", "32", "--width", "48", "--steps", "1")


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_all_dispatchers_agree(num_ranks):
    launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    start = launch if num_ranks > 1 else ()
    done = run(*start, "-m", "weft.examples.moe_layer", *ARGUMENTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"on {num_ranks} cpu ranks" in done.stdout
    losses = [line.split()[1] for line in done.stdout.splitlines() if "." in line.split(" ")[-1]]
    assert len(losses) == 6 and len(set(losses)) == 1, done.stdout
    assert done.stdout.rstrip().endswith("all results agree")
