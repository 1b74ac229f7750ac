# SPDX-License-Identifier: Apache-2.0
"""The programs under test, and hosts to run them on."""

import os

import pytest

import lab as labs

PROGRAM = os.environ.get("WEFT_PROGRAM", "build/cpu/apps/weft/weft")
HOSTS_BENCH = os.environ.get("WEFT_HOSTS_BENCH", "build/cpu/bench/hosts_bench")
HOST_RANK = os.environ.get("WEFT_HOST_RANK", "build/cpu/tests/hosts/host_rank")


@pytest.fixture(scope="session", autouse=True)
def machine():
    """All tests here are skipped where namespaces are forbidden."""
    reason = labs.obstacle()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def make_lab():
    """Makes labs that end with the test."""
    made = []

    def make(num_hosts, **options):
        made.append(labs.Lab(num_hosts, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
