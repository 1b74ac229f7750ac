# SPDX-License-Identifier: Apache-2.0
"""Networks and hosts that fail: an error on every surviving rank within the deadline, naming the
rank and what was waited for, and a new group in the same processes. What is only slow stays right.
"""

import re
import sys
import time

import pytest

import stranger
from conftest import HOST_RANK
from job import LIMIT_S, PORT, Job
from panel import Link

# Of a call. Long enough for a busy machine, since every wrong alarm fails a test.
TIMEOUT_S = 6
ENDLESS = [HOST_RANK, "--rounds", 1000000, "--timeout-ms", 1000 * TIMEOUT_S]


def start_endless(hosts, survivors, **variables):
    """Ranks that exchange tokens until something goes wrong; then `survivors`, hosts in groups,
    make a new group each. Returns the job when all are at work."""
    job = Job(hosts, None, **variables)
    for group, members in enumerate(survivors):
        ranks = [rank for rank in range(job.num_ranks) if hosts[rank // job.per_host] in members]
        for place, rank in enumerate(ranks):
            again = [place, len(ranks), members[0].address, PORT + 1 + group]
            job.start(rank, [*ENDLESS, "--again", *again])
    for rank in range(job.num_ranks):
        if not any(hosts[rank // job.per_host] in members for members in survivors):
            job.start(rank, ENDLESS)
    for one in job.ranks:
        one.wait_for("round 2")
    return job


def errors_of(job, hosts):
    """Returns the "error " line of each rank on these hosts, in the order of their start."""
    return [one.wait_for("error ") for one in job.ranks if one.host in hosts]


def expect_new_groups(job, hosts):
    for one in job.ranks:
        if one.host in hosts:
            one.wait_for("good again")
            assert one.wait() == 0, one.say()
    # Nothing is left in the memory that ranks of a host share.
    for host in hosts:
        listing = host.start("ls", "/dev/shm")
        assert listing.communicate(timeout=LIMIT_S)[0] == ""


def test_a_host_that_is_killed_is_named_by_all_others(make_lab):
    a, b, c = make_lab(3).hosts
    job = start_endless([a, b, c], [[a, b]])
    c.kill()
    for error in errors_of(job, [a, b]):
        assert re.search(r"error (plan|dispatch|combine): .*rank [45] (died|left)", error), error
    expect_new_groups(job, [a, b])


def test_who_cannot_see_a_death_hears_of_it_from_one_that_leaves(make_lab):
    lab = make_lab(3)
    a, b, c = lab.hosts
    job = start_endless([a, b, c], [[a, b]], per_host=1)
    # Stopped first: when all that it has sent is there, the one that sees its death misses it, too.
    job.ranks[2].stop()
    time.sleep(0.5)
    lab.part(a, c)
    c.kill()
    for error in errors_of(job, [a, b]):
        assert re.search(r"error (plan|dispatch|combine): .*rank 2 died", error), error
    expect_new_groups(job, [a, b])


def test_a_host_that_vanishes_in_silence_is_waited_for_no_longer_than_agreed(make_lab):
    lab = make_lab(3)
    a, b, c = lab.hosts
    job = start_endless([a, b, c], [[a, b]])
    lab.cut(c)
    c.kill()
    errors = errors_of(job, [a, b])
    # A rank that gives up leaves, so another may hear of that before its own time is over.
    late = [e for e in errors if re.search(rf"no .* for {TIMEOUT_S}\.0 s from .*rank [45]", e)]
    left = [e for e in errors if re.search(r"rank [0-3] left the exchange before ", e)]
    # One that came to the call earlier names the rank that it waits for, which waits itself.
    waiting = [re.search(rf"no .* for {TIMEOUT_S}\.0 s from rank ([0-3])\b", e) for e in errors]
    behind = [one for one in waiting if one and errors[int(one[1])] in late]
    assert late and len(late) + len(left) + len(behind) == len(errors), errors
    expect_new_groups(job, [a, b])


def test_a_cut_link_ends_the_call_on_both_sides(make_lab):
    lab = make_lab(2)
    a, b = lab.hosts
    job = start_endless([a, b], [[a], [b]])
    lab.cut(b)
    for host, others in ((a, "[23]"), (b, "[01]")):
        errors = errors_of(job, [host])
        late = rf"no .* for {TIMEOUT_S}\.0 s from .*rank {others}"
        assert any(re.search(late, error) for error in errors), errors
    expect_new_groups(job, [a, b])


def test_a_host_that_stalls_is_named_and_learns_of_it(make_lab):
    a, b = make_lab(2).hosts
    job = start_endless([a, b], [[a], [b]])
    stalled = [one for one in job.ranks if one.host is b]
    for one in stalled:
        one.stop()
    errors = errors_of(job, [a])
    late = rf"no .* for {TIMEOUT_S}\.0 s from .*rank [23]"
    assert any(re.search(late, error) for error in errors), errors
    expect_new_groups(job, [a])
    for one in stalled:
        one.resume()
    # Each was stopped at another place: it may miss the other one of its host.
    for error in errors_of(job, [b]):
        assert re.search(r"error (plan|dispatch|combine|put): .*rank [0-3]\b", error), error
    expect_new_groups(job, [b])


def test_a_link_that_is_away_for_a_moment_only_costs_time(make_lab):
    lab = make_lab(2)
    job = Job(lab.hosts, [HOST_RANK, "--rounds", 40]).start_all()
    job.ranks[0].wait_for("round 2")
    lab.cut(lab.hosts[1])
    time.sleep(1)
    lab.mend(lab.hosts[1])
    job.wait()


BAD_LINKS = {
    "late": Link(delay_s=0.05),
    "lossy": Link(loss=0.05),
    "out of order": Link(reorder=0.2),
    "all of it": Link(delay_s=0.005, loss=0.01, reorder=0.05),
}


@pytest.mark.parametrize("link", BAD_LINKS.values(), ids=BAD_LINKS.keys())
def test_bad_links_only_cost_time(make_lab, link):
    lab = make_lab(2, link=link)
    Job(lab.hosts, [HOST_RANK, "--rounds", 3]).start_all().wait()
    assert lab.panel.num_lost > 0 or link.loss == 0
    assert lab.panel.num_late > 0 or link.reorder == 0


def test_a_late_rank_is_waited_for(make_lab):
    job = Job(make_lab(2).hosts, [HOST_RANK])
    for rank in (0, 1, 2):
        job.start(rank)
    time.sleep(2)
    job.start(3)
    job.wait()


def test_a_rank_that_never_comes_is_named_by_all(make_lab):
    job = Job(make_lab(2).hosts, [HOST_RANK], WEFT_TIMEOUT_S=3)
    for rank in (0, 1, 2):
        job.start(rank)
    job.wait(code=1)
    for one in job.ranks:
        assert "error connect: rank 3 did not join at 10.77.0.2:29700 within 3.0 s" in one.out[-1]


def test_a_rank_that_joins_twice_is_named_by_all(make_lab):
    job = Job(make_lab(2).hosts, [HOST_RANK])
    for rank in (0, 1, 2, 1):
        job.start(rank)
    job.wait(code=1)
    for one in job.ranks:
        assert "error connect: rank 1 joined twice at " in one.out[-1], one.say()


def test_a_rank_with_another_secret_stays_outside(make_lab):
    job = Job(make_lab(2).hosts, [HOST_RANK], WEFT_TIMEOUT_S=3)
    for rank in (0, 1, 2):
        job.start(rank)
    wrong = job.start(3, WEFT_SECRET="another secret, as long")
    job.wait(code=1)
    assert "error connect: rank 0 at 10.77.0.2:29700 holds another secret" in wrong.out[-1]
    for one in job.ranks[:3]:
        assert "rank 3 did not join" in one.out[-1], one.say()
        assert "calls itself rank 3 proved another secret" in one.out[-1], one.say()


def test_a_rank_of_another_version_is_named_by_all(make_lab):
    a, b = make_lab(2).hosts
    job = Job([a, b], [HOST_RANK])
    for rank in (0, 1, 2):
        job.start(rank)
    other = b.start(sys.executable, stranger.__file__, a.address, 3, 4, 1000)
    told, problem = other.communicate(timeout=LIMIT_S)
    job.wait(code=1)
    said = "connect: rank 3 speaks version 1000 (rank 0: "
    assert told.startswith(f"refused {said}"), problem
    for one in job.ranks:
        assert one.out[-1].startswith(f"error {said}"), one.say()


def test_another_setting_of_libfabric_is_named_by_all_ranks(make_lab):
    hosts = make_lab(2).hosts
    job = Job(hosts, [HOST_RANK])
    for rank in range(4):
        job.start(rank, FI_OFI_RXM_BUFFER_SIZE=2048 if rank == 2 else 1024)
    for error in errors_of(job, hosts):
        assert "connect: FI_OFI_RXM_BUFFER_SIZE is 2048 on rank 2 (this rank: 1024" in error, error


def test_a_provider_that_gets_no_memory_is_named_by_all_ranks(make_lab):
    a, b = make_lab(2).hosts
    # With the buffers that libfabric would like, which have no room where one rank may take 40 MB.
    job = Job([a, b], None, FI_OFI_RXM_BUFFER_SIZE=None)
    for rank in range(4):
        limit = ["--spare-mb", 40] if rank == 3 else []
        job.start(rank, [HOST_RANK, *limit, "--again", rank, 4, a.address, PORT + 1])
    refusal = r"fi_\w+: (Cannot allocate memory|Resource temporarily unavailable).*, on rank 3 \["
    for error in errors_of(job, [a, b]):
        assert re.search(refusal, error), error
    expect_new_groups(job, [a, b])
