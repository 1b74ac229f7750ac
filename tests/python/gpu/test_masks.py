# SPDX-License-Identifier: Apache-2.0
"""Doors with masks on GPUs: a rank is killed, and the calls of the others return, with what those
that are left make of them; calls with hooks and replays, and those between domains, with nothing
for a while before. Ranks share the GPUs that there are."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from weft.compat import deep_ep, flashinfer, nixl_ep

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "compat"))
import flashinfer_stub as stub  # noqa: E402
from call_cases import domains_of  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

HIDDEN, TOKENS, TOPK, LOCAL = 256, 24, 3, 2
RANKS, VICTIM = 4, 1
REST = [rank for rank in range(RANKS) if rank != VICTIM]
DEATH, ROUNDS, LAST = 8, 50, 12  # the round that the victim does not make, all, those that count
SECOND, SECOND_DEATH = 3, 22  # a rank that may die, too, and the round that it does not make
LIMIT = 40.0  # seconds of a test, the start of its processes included


def inputs_of(rank):
    gen = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 8, (TOKENS, HIDDEN), generator=gen).to(torch.bfloat16)
    return x, torch.rand(TOKENS, LOCAL * RANKS, generator=gen).topk(TOPK).indices


class Layer:
    """A dispatch and a combine that adds up a token's copies."""

    def __init__(self, rank):
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.rank = rank
        x, idx = inputs_of(rank)
        self.x, self.idx = x.to(self.device), idx.to(self.device)
        self.ones = torch.ones(TOKENS, TOPK, device=self.device)

    def expected(self, alive):
        """Rows of each expert here, and this rank's sums."""
        chosen = torch.cat([inputs_of(rank)[1] for rank in alive])
        counts = [int((chosen == self.rank * LOCAL + e).sum()) for e in range(LOCAL)]
        owners = self.idx.div(LOCAL, rounding_mode="floor")
        kept = torch.isin(owners, torch.tensor(alive, device=self.device)).sum(1, keepdim=True)
        return counts, self.x * kept


class LowLatency(Layer):
    """DeepEP V1."""

    def __init__(self, rank, group, folder):
        super().__init__(rank)
        del folder
        self.buffer = deep_ep.Buffer(
            group, 0, 1 << 20, low_latency_mode=True, enable_shrink=True, explicitly_destroy=True
        )
        self.dispatch = self.buffer.low_latency_dispatch
        self.combine = self.buffer.low_latency_combine

    def round(self, has_hook=False):
        rows, counts, handle, _, hook = self.dispatch(
            self.x, self.idx, TOKENS, LOCAL * RANKS, use_fp8=False, return_recv_hook=has_hook
        )
        if has_hook:
            hook()
        out, _, hook = self.combine(rows, self.idx, self.ones, handle, return_recv_hook=has_hook)
        if has_hook:
            hook()
        return counts, out

    def masked(self):
        status = torch.empty(RANKS, dtype=torch.int32, device=self.device)
        self.buffer.low_latency_query_mask_buffer(status)
        return [rank for rank, one in enumerate(status.tolist()) if one != 0]

    def check_after(self, lost=(VICTIM,)):
        """Checks that lost ranks are masked and cannot be taken in again yet."""
        assert self.masked() == list(lost)
        with pytest.raises(weft.Unsupported, match="rank 1 is lost and cannot be taken in again"):
            self.buffer.low_latency_clean_mask_buffer()


class Nixl(LowLatency):
    def __init__(self, rank, group, folder):
        Layer.__init__(self, rank)
        store = dist.FileStore(f"{folder}/store", RANKS)
        self.buffer = nixl_ep.Buffer(rank=rank, explicitly_destroy=True, tcp_store_group=store)
        self.buffer.update_memory_buffers(RANKS, LOCAL, 0)
        self.buffer.connect_ranks(list(range(RANKS)))
        self.dispatch, self.combine = self.buffer.dispatch, self.buffer.combine

    def check_after(self, lost=(VICTIM,)):
        self.buffer.clean_mask_buffer()
        assert self.masked() == list(lost)
        with pytest.raises(weft.InvalidArgument, match="rank_to_mask = 1 is lost"):
            self.buffer.update_mask_buffer(VICTIM)
        self.buffer.barrier()


class FleetOfExperts(Layer):
    """FlashInfer, with a block for each expert."""

    layout = stub.EpLayout.EXPERT_MAJOR

    def __init__(self, rank, group, folder):
        super().__init__(rank)
        del group
        store = dist.FileStore(f"{folder}/store", RANKS)
        with stub.installed("flashinfer.moe_ep"):
            flashinfer.register()
            bootstrap = stub.BootstrapConfig(RANKS, rank, None, store)
            sizes = stub.FleetParams(LOCAL * RANKS, TOKENS, HIDDEN, layout=self.layout)
            knobs = [stub.FleetAlgoKnobFaultTolerance(timeout_ms=15000)]
            self.fleet = stub.create_fleet(bootstrap, sizes, knobs, "weft")

    def round(self, has_hook=False):
        knobs = [stub.HandleAlgoKnobTopKWeights(self.ones)]
        if has_hook:
            knobs.append(stub.HandleAlgoKnobSplitOperation())
        handle = self.fleet.create_handle(stub.HandleParams(self.idx), knobs)
        got = handle.dispatch(stub.DispatchInputParams([self.x]))
        handle.complete()
        out = handle.combine(stub.CombineInputParams([self.computed(got)])).x
        handle.complete()
        return self.counts(got), out

    def computed(self, got):
        return got.expert_tensors

    def counts(self, got):
        return got.expert_counts

    def masked(self):
        return [rank for rank, one in enumerate(self.fleet.query_active_mask().tolist()) if not one]

    def check_after(self, lost=(VICTIM,)):
        assert self.fleet.query_fault()
        self.fleet.clear_faults()
        assert not self.fleet.query_fault() and self.masked() == list(lost)


class FleetOfRanks(FleetOfExperts):
    """FlashInfer, with a block for each source: a row is for all of a token's choices here."""

    layout = stub.EpLayout.RANK_MAJOR

    def computed(self, got):
        here = (got.recv_topk_idx >= 0).sum(1).view(RANKS, TOKENS, 1)
        return torch.where(here > 0, got.expert_tensors * here, 0)

    def counts(self, got):
        ids = got.recv_topk_idx
        return torch.stack([(ids == expert).sum() for expert in range(LOCAL)])


DOORS = [LowLatency, Nixl, FleetOfExperts, FleetOfRanks]
NAMES = ["deep_ep", "nixl_ep", "experts", "ranks"]


def is_right(made, wanted):
    return made[0].tolist() == wanted[0] and torch.equal(made[1], wanted[1])


def die():
    torch.cuda.synchronize()
    os.kill(os.getpid(), signal.SIGKILL)


def eager(rank, num_ranks, group, door, folder, dying, per_domain=RANKS):
    """Ranks hear of it at different calls: some by a query, some by a call, some rounds ahead."""
    with domains_of(per_domain, num_ranks) as group:
        layer = DOORS[door](rank, group, folder)
    made = []
    for number in range(ROUNDS):
        if rank in dying and number == (DEATH if rank == VICTIM else SECOND_DEATH):
            die()
        made.append(layer.round(has_hook=number % 3 == 2))
        if rank != 0 or number % 4 == 3:
            torch.cuda.synchronize()
        if rank == 2 and number % 2 == 1:
            layer.masked()
    assert layer.masked() == list(dying)
    torch.cuda.synchronize()
    everybody = layer.expected(list(range(RANKS)))
    rest = layer.expected([one for one in range(RANKS) if one not in dying])
    # When the victim was through with the round before its last, so were all with that before.
    assert all(is_right(one, everybody) for one in made[: DEATH - 1])
    assert all(is_right(one, rest) for one in made[-LAST:])
    for counts, out in made[DEATH:]:  # cut short, left out, or of those that are left
        assert out.isfinite().all() and min(counts.tolist()) >= 0
    layer.check_after(dying)
    assert is_right(layer.round(), rest)


@pytest.mark.parametrize("dying", [(VICTIM,), (VICTIM, SECOND)], ids=["one", "two"])
@pytest.mark.parametrize("door", range(len(DOORS)), ids=NAMES)
def test_calls_return_when_a_rank_is_killed(ranks, door, dying, tmp_path):
    ranks(eager, RANKS, door, str(tmp_path), dying, dying=dying, seconds=LIMIT)


@pytest.mark.parametrize("door", range(len(DOORS)), ids=NAMES)
def test_calls_between_domains_return_when_a_rank_is_killed(ranks, door, tmp_path):
    dying = (VICTIM, SECOND)
    ranks(eager, RANKS, door, str(tmp_path), dying, 2, dying=dying, seconds=LIMIT)


def told_at_once(rank, num_ranks, group, door, folder, kill_after):
    """A rank that looks right after a call finds what the call has found. kill_after: milliseconds
    from the first round on; None: before a round."""
    layer = DOORS[door](rank, group, folder)
    everybody, rest = layer.expected(list(range(RANKS))), layer.expected(REST)
    layer.round()
    torch.cuda.synchronize()
    dist.barrier(group)
    if rank == VICTIM and kill_after is not None:
        threading.Timer(kill_after / 1000, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    found = []
    for number in range(ROUNDS):
        if rank == VICTIM and kill_after is None and number == DEATH:
            die()
        made = layer.round()
        torch.cuda.synchronize()
        kinds = [everybody, rest, (everybody[0], rest[1])]
        found.append(([is_right(made, kind) for kind in kinds], layer.masked()))
    if rank == VICTIM:
        time.sleep(LIMIT)
    told = next((i for i, (_, masked) in enumerate(found) if masked), ROUNDS)
    assert all(one == ([True, False, False], []) for one in found[:told])
    assert all(one == ([False, True, False], [VICTIM]) for one in found[told + 1 :])
    # It may have died behind the dispatch of that round, or behind the round.
    assert told == ROUNDS or sum(found[told][0]) == 1
    if kill_after is None:
        assert told in (DEATH - 1, DEATH) and found[DEATH] == ([False, True, False], [VICTIM])


@pytest.mark.parametrize("kill_after", [None, 20, 43, 71, 96])
@pytest.mark.parametrize("door", range(len(DOORS)), ids=NAMES)
def test_a_look_after_a_call_finds_who_died_in_it(ranks, door, kill_after, tmp_path):
    ranks(told_at_once, RANKS, door, str(tmp_path), kill_after, dying=(VICTIM,), seconds=LIMIT)


def queued(rank, _num_ranks, group, door, folder):
    """Rounds that were queued behind the one in which a rank dies are those of the rest."""
    layer = DOORS[door](rank, group, folder)
    everybody, rest = layer.expected(list(range(RANKS))), layer.expected(REST)
    made = [layer.round() for _ in range(DEATH)]
    torch.cuda.synchronize()
    if rank == VICTIM:
        die()
    made += [layer.round() for _ in range(ROUNDS)]
    torch.cuda.synchronize()
    assert all(is_right(one, everybody) for one in made[:DEATH])
    assert all(is_right(one, rest) for one in made[DEATH:])
    assert layer.masked() == [VICTIM]


@pytest.mark.parametrize("door", range(len(DOORS)), ids=NAMES)
def test_what_is_queued_behind_a_death_is_right(ranks, door, tmp_path):
    ranks(queued, RANKS, door, str(tmp_path), dying=(VICTIM,), seconds=LIMIT)


def old_handles(rank, _num_ranks, group):
    """A combine by a dispatch from before the death brings what the rest has of it."""
    layer = LowLatency(rank, group, None)
    rest = layer.expected(REST)
    rows, _, handle, _, _ = layer.dispatch(layer.x, layer.idx, TOKENS, LOCAL * RANKS, use_fp8=False)
    torch.cuda.synchronize()
    dist.barrier(group)
    if rank == VICTIM:
        die()
    for _ in range(3):
        out = layer.combine(rows, layer.idx, layer.ones, handle)[0]
        torch.cuda.synchronize()
        assert layer.masked() == [VICTIM]
        assert torch.equal(out, rest[1])
    assert is_right(layer.round(), rest)


def test_handles_from_before_a_death_hold(ranks):
    ranks(old_handles, RANKS, dying=(VICTIM,), seconds=LIMIT)


def late(rank, _num_ranks, group, is_cleaned):
    """A rank that lives and does not come to a call within the deadline. Ranks that share a GPU
    wait longer than it: each looks at the clock in turn."""
    os.environ["WEFT_CALL_TIMEOUT_S"] = "2"
    try:
        layer = LowLatency(rank, group, None)
        everybody, rest = layer.expected(list(range(RANKS))), layer.expected(REST)
        assert is_right(layer.round(), everybody)
        torch.cuda.synchronize()
        if rank == VICTIM:
            dist.barrier(group)
            with pytest.raises(weft.PeerError, match="was given up"):
                layer.round()
                torch.cuda.synchronize()
                layer.round()
        else:
            if is_cleaned:
                layer.buffer.clean_low_latency_buffer(TOKENS, HIDDEN, LOCAL * RANKS)
            else:
                assert is_right(layer.round(), rest)
            assert layer.masked() == [VICTIM]
            for _ in range(3):
                assert is_right(layer.round(), rest)
            dist.barrier(group)
    finally:
        del os.environ["WEFT_CALL_TIMEOUT_S"]
    dist.barrier(group)


@pytest.mark.parametrize("is_cleaned", [False, True], ids=["call", "clean"])
def test_a_rank_that_does_not_come_is_masked(ranks, is_cleaned):
    ranks(late, RANKS, is_cleaned, seconds=LIMIT)


def counted(rank, _num_ranks, group):
    """Statistics count a call that is made again once."""
    layer = LowLatency(rank, group, None)
    everybody, rest = layer.expected(list(range(RANKS))), layer.expected(REST)
    stats = torch.zeros(LOCAL, dtype=torch.int32, device=layer.device)
    for number in range(2 * DEATH):
        if rank == VICTIM and number == DEATH:
            die()
        layer.dispatch(
            layer.x,
            layer.idx,
            TOKENS,
            LOCAL * RANKS,
            use_fp8=False,
            cumulative_local_expert_recv_stats=stats,
        )
        torch.cuda.synchronize()
    wanted = [DEATH * (one + other) for one, other in zip(everybody[0], rest[0])]
    assert stats.tolist() == wanted


def test_statistics_count_a_call_once(ranks):
    ranks(counted, RANKS, dying=(VICTIM,), seconds=LIMIT)


def replayed(rank, _num_ranks, group, door, folder):
    """A query between replays hears of it."""
    layer = DOORS[door](rank, group, folder)
    everybody, rest = layer.expected(list(range(RANKS))), layer.expected(REST)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            assert is_right(layer.round(), everybody)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = layer.round()
        for number in range(DEATH):
            graph.replay()
            torch.cuda.synchronize()
            assert layer.masked() == [] or number == DEATH - 1
            assert number == DEATH - 1 or is_right(made, everybody)
            if number == DEATH - 2:
                dist.barrier(group)
                if rank == VICTIM:
                    die()
        while layer.masked() != [VICTIM]:
            graph.replay()
            torch.cuda.synchronize()
        for _ in range(4):
            graph.replay()
            torch.cuda.synchronize()
            assert is_right(made, rest)
            assert layer.masked() == [VICTIM]
        for has_hook in (False, True):
            assert is_right(layer.round(has_hook), rest)
        torch.cuda.synchronize()
    layer.check_after()


@pytest.mark.parametrize("door", range(len(DOORS)), ids=NAMES)
def test_a_replayed_graph_goes_on_when_a_rank_is_killed(ranks, door, tmp_path):
    ranks(replayed, RANKS, door, str(tmp_path), dying=(VICTIM,), seconds=LIMIT)


def given_up(rank, _num_ranks, group):
    """The others mask a rank that lives; it hears that by a call."""
    layer = LowLatency(rank, group, None)
    everybody, rest = layer.expected(list(range(RANKS))), layer.expected(REST)
    assert is_right(layer.round(), everybody)
    dist.barrier(group)
    if rank == VICTIM:
        with pytest.raises(weft.PeerError, match="was given up"):
            while True:
                layer.round()
                torch.cuda.synchronize()
    else:
        layer.buffer.low_latency_update_mask_buffer(VICTIM, True)
        assert layer.masked() == [VICTIM]
        made = []
        for _ in range(ROUNDS):
            made.append(layer.round())
            torch.cuda.synchronize()
        assert all(is_right(one, rest) for one in made[-LAST:])
        layer.buffer.low_latency_update_mask_buffer(VICTIM, True)  # once more does nothing
        assert is_right(layer.round(), rest)
        layer.check_after()
    dist.barrier(group)


def test_a_rank_that_is_masked_hears_of_it(ranks):
    ranks(given_up, RANKS, seconds=LIMIT)
