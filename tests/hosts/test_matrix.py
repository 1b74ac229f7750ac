# SPDX-License-Identifier: Apache-2.0
"""Four hosts of two ranks, provider tcp: results are right, whoever started the ranks."""

import json
import re

import pytest

from conftest import HOST_RANK, HOSTS_BENCH, PROGRAM
from job import LAUNCHERS, Job
from lab import Lab


@pytest.fixture(scope="module")
def four_hosts():
    """One lab for all tests here: none of them harms it."""
    with Lab(4) as made:
        yield made.hosts


def test_every_case_of_weft_check_equals_the_reference(four_hosts):
    said = Job(four_hosts, [PROGRAM, "check", "--quick"]).start_all().wait()
    equal, total = map(int, re.search(r"(\d+) of (\d+) cases equal the reference", said).groups())
    assert said.startswith("8 ranks\n")
    assert equal == total > 90
    assert "FAIL" not in said


def test_weft_bench_measures_checked_results(four_hosts):
    said = Job(four_hosts, [PROGRAM, "bench", "--smoke"]).start_all().wait()
    assert re.search(r"^8 ranks over \w+, 64 tokens each", said, re.M)
    for operation in ("plan", "dispatch", "combine", "plan+dispatch"):
        assert re.search(rf"^{re.escape(operation)} +exact direct +- +yes ", said, re.M), said


@pytest.mark.skipif(not HOSTS_BENCH, reason="built without libfabric")
def test_dispatch_and_combine_can_be_compared_with_a_plain_stream(four_hosts, tmp_path):
    found = tmp_path / "hosts.json"
    said = Job(four_hosts, [HOSTS_BENCH, "--smoke", "--json", found]).start_all().wait()
    assert said.startswith("8 ranks on 4 hosts, ")
    rows = json.loads(found.read_text())["rows"]
    checked = {row["op"]: row["checked"] for row in rows}  # a stream has nothing to check
    streams = "4 fabric streams at once"
    assert list(checked) == ["dispatch", "combine", streams, "plan"]
    assert [op for op in checked if not checked[op]] == [streams]
    for row in rows[:2]:
        assert row["wire_bytes"] > 0
        assert row["rival"]["name"] == "fabric stream" and row["rival"]["us_p50"] > 0


@pytest.mark.skipif(not HOSTS_BENCH, reason="built without libfabric")
def test_the_stream_needs_a_second_host(four_hosts):
    said = Job(four_hosts[:1], [HOSTS_BENCH, "--smoke"]).start_all().wait(code=77)
    assert "the ranks are on one host (at least 2)" in said


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_find_each_other_under_every_launcher(four_hosts, launcher):
    Job(four_hosts, [HOST_RANK, "--rounds", 2], launcher=launcher).start_all().wait()


def test_ranks_of_one_host_are_one_domain(four_hosts):
    # Domains of one rank each: all but shared memory is the same.
    variables = {"WEFT_RANKS_PER_DOMAIN": 1}
    Job(four_hosts[:2], [HOST_RANK, "--rounds", 2], **variables).start_all().wait()
    # Three do not fit two domains of two, so that is what the hosts must be.
    job = Job(four_hosts[:2], [HOST_RANK], **{"WEFT_RANKS_PER_DOMAIN": 3}).start_all()
    job.wait(code=1)
    for rank in job.ranks:
        assert "WEFT_RANKS_PER_DOMAIN = 3 does not divide a domain of 2 ranks" in rank.out[-1]


def test_hosts_may_have_different_numbers_of_ranks(four_hosts):
    job = Job([four_hosts[0], four_hosts[0], four_hosts[1]], [HOST_RANK, "--rounds", 2], per_host=1)
    job.start_all().wait()


def test_weft_info_shows_the_network_of_a_host(four_hosts):
    host = four_hosts[2]
    alone = {"WEFT_RANK": None, "WEFT_NUM_RANKS": None}
    said = Job([host], [PROGRAM, "info", "--fabric"], per_host=1, **alone).start_all().wait()
    assert re.search(r"chosen +tcp$", said, re.M)
    assert re.search(rf"bound to +{host.address}$", said, re.M)


def test_without_a_network_to_use_all_ranks_say_which_variable_is_missing(four_hosts):
    job = Job(four_hosts[:2], [HOST_RANK], WEFT_FABRIC_ADDRESS=None).start_all()
    job.wait(code=1)
    for rank in job.ranks:
        assert "WEFT_FABRIC_ADDRESS, the network to use, is not set" in rank.out[-1]
