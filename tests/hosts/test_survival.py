# SPDX-License-Identifier: Apache-2.0
"""Hosts that are lost while the others go on (PeerLoss::kShrink): those who can hear more than half
of the ranks, or know that the others have ended."""

import re

from conftest import HOST_RANK
from job import LIMIT_S, Job

TIMEOUT_S = 2


def start(hosts, num_left, *more, per_host=2):
    """Ranks that exchange tokens until so many are left."""
    command = [HOST_RANK, "--timeout-ms", 1000 * TIMEOUT_S, "--shrink", num_left, *more]
    job = Job(hosts, command, per_host).start_all()
    for one in job.ranks:
        one.wait_for("round 2")
    return job


def expect_alive(job, hosts, alive):
    """Every rank on these hosts has gone on among these ranks, with the right bits."""
    for one in job.ranks:
        if one.host in hosts:
            one.wait_for("good")
            assert f"alive {alive}" in [line.strip() for line in one.out], one.say()
            assert one.wait() == 0, one.say()


def expect_late(job, hosts):
    """The ranks on these hosts have ended for the others, or for each other."""
    for one in job.ranks:
        if one.host in hosts:
            error = one.wait_for("error ")
            assert re.search(r"for \d+\.0 s from .*rank|left|given up|lost", error), error


def test_the_rest_goes_on_when_a_host_is_killed(make_lab):
    a, b, c = make_lab(3).hosts
    job = start([a, b, c], 4)
    c.kill()
    expect_alive(job, [a, b], "0 1 2 3")


def test_the_rest_goes_on_when_two_of_three_hosts_are_killed(make_lab):
    a, b, c = make_lab(3).hosts
    job = start([a, b, c], 2)
    a.kill()
    c.kill()
    expect_alive(job, [b], "2 3")


def test_those_who_hear_more_than_half_go_on_without_a_host_that_is_cut_off(make_lab):
    lab = make_lab(3)
    a, b, c = lab.hosts
    job = start([a, b, c], 4)
    lab.cut(a)
    expect_alive(job, [b, c], "2 3 4 5")
    expect_late(job, [a])


def test_neither_half_goes_on_without_the_other(make_lab):
    lab = make_lab(2)
    a, b = lab.hosts
    job = start([a, b], 2)
    lab.cut(b)
    expect_late(job, [a, b])


def test_two_hosts_that_do_not_hear_each_other_do_not_leave_each_other_out(make_lab):
    lab = make_lab(3)
    a, b, c = lab.hosts
    job = start([a, b, c], 2, per_host=1)
    lab.part(a, c)
    expect_alive(job, [a, b], "0 1")
    error = job.ranks[2].wait_for("error ")
    assert "was given up by the others" in error, error


def test_a_new_process_on_a_host_takes_the_place_of_a_lost_rank(make_lab):
    a, b, c = make_lab(3).hosts
    job = start([a, b, c], 2, "--call-back", per_host=1)
    job.ranks[0].kill()
    invitation = job.ranks[1].wait_for("invitation ").split()[1]
    job.start(0, [HOST_RANK, "--timeout-ms", 1000 * LIMIT_S, "--join", 0, invitation])
    expect_alive(job, [b, c], "0 1 2")
    joined = job.ranks[3]
    joined.wait_for("alive 0 1 2")
    assert joined.wait() == 0, joined.say()
