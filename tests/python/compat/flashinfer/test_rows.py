# SPDX-License-Identifier: Apache-2.0
"""Fleets whose ranks get a token once, against loops over everybody's tokens and a dense layer."""

import os
import signal

import flashinfer_stub as stub
import pytest
import torch
import torch.distributed as dist
from buffer_cases import gather

import weft
from weft.compat import flashinfer

PLACE = "flashinfer.moe_ep"
MOST, HIDDEN, LOCAL = 12, 16, 3  # tokens of a rank, columns, experts of a rank
FLAT = {"algorithm": stub.EpAlgorithm.HIGH_THROUGHPUT}
BLOCKS = {"layout": stub.EpLayout.RANK_MAJOR}
KINDS = [pytest.param(FLAT, id="flat"), pytest.param(BLOCKS, id="blocks")]


def made(rank, num_ranks, store, kind, *knobs, group=None, num_experts=None, most=MOST):
    flashinfer.register()
    bootstrap = stub.BootstrapConfig(num_ranks, rank, group, store)
    sizes = stub.FleetParams(num_experts or LOCAL * num_ranks, most, HIDDEN, **kind)
    return stub.create_fleet(bootstrap, sizes, knobs, "weft")


class Case:
    """A rank's tokens, choices and weights, and those of all ranks."""

    def __init__(self, rank, group, idx, dtype=torch.bfloat16):
        gen = torch.Generator().manual_seed(rank)
        self.rank, self.idx = rank, idx
        self.x = torch.randn(len(idx), HIDDEN, generator=gen).to(dtype)
        self.weights = torch.rand(idx.shape, generator=gen)
        self.all_x, self.all_idx = gather(group, self.x), gather(group, idx)
        self.all_weights = gather(group, self.weights)

    def local(self, source, token, owner=None):
        """A token's choices as the experts of this rank, or another."""
        first = LOCAL * (self.rank if owner is None else owner)
        return [
            int(e) - first if first <= e < first + LOCAL else -1
            for e in self.all_idx[source][token]
        ]

    def arrivals(self, source):
        """Tokens of `source` with a choice here, in order."""
        return [t for t in range(len(self.all_idx[source])) if max(self.local(source, t)) >= 0]

    def dense(self, members, num_ranks):
        """Results in fp32 of a layer with all experts for this rank's tokens; only those of
        `members` take part."""
        out = torch.zeros(self.x.shape)
        for token, row in enumerate(self.x.float()):
            for e, weight in zip(self.idx[token].tolist(), self.weights[token]):
                if 0 <= e < LOCAL * num_ranks and e // LOCAL in members:
                    out[token] += weight * expert(e, row)
        return out


def expert(number, row):
    return torch.tanh(row * (number + 1)) - 0.1 * number


def computed(rank, got):
    """Results of a rank's experts for its rows: weighted, and added up; NaN where no token is,
    which no rank may read."""
    rows = got.expert_tensors.flatten(0, 1)
    out = torch.full_like(rows, float("nan"))
    for n, (row, ids, weights) in enumerate(zip(rows, got.recv_topk_idx, got.recv_topk_weights)):
        here = [(LOCAL * rank + int(e), w) for e, w in zip(ids, weights) if e >= 0]
        if here:
            out[n] = sum(w * expert(e, row.float()) for e, w in here).to(rows.dtype)
    return out.view_as(got.expert_tensors)


def check_rows(case, got, members, num_ranks, is_flat):
    """Checks the rows that came; returns how many they are."""
    rows = got.expert_tensors.flatten(0, 1)
    assert got.expert_tensors.shape == (num_ranks, MOST, HIDDEN)
    assert got.num_tokens == len(rows) and got.expert_scales is None
    assert got.recv_topk_idx.dtype == torch.int64 and got.recv_topk_weights.dtype == torch.float32
    sources = [case.arrivals(s) if s in members else [] for s in range(num_ranks)]
    arrivals = [(s, i, t) for s, tokens in enumerate(sources) for i, t in enumerate(tokens)]
    if is_flat:
        want = {n: (s, t) for n, (s, _, t) in enumerate(arrivals)}
        assert got.expert_counts is None
    else:
        want = {s * MOST + i: (s, t) for s, i, t in arrivals}
        assert got.expert_counts.dtype == torch.int32
        assert got.expert_counts.tolist() == [len(tokens) for tokens in sources]
    for n in range(len(rows)):
        ids, weights = got.recv_topk_idx[n].tolist(), got.recv_topk_weights[n].tolist()
        if n not in want:
            assert set(ids) == {-1} and set(weights) == {0.0}
            continue
        source, token = want[n]
        assert torch.equal(rows[n], case.all_x[source][token])
        assert ids == case.local(source, token)
        sent = case.all_weights[source][token].tolist()
        assert weights == [w if e >= 0 else 0.0 for e, w in zip(ids, sent)]
    return len(want)


def step(case, fleet, members=None, *knobs, out=None, left=None):
    """A dispatch among `members` (None: all) and a combine of those that are left then (None: the
    same), compared."""
    num_ranks = fleet.sizes.num_ranks
    members = range(num_ranks) if members is None else members
    is_flat = fleet.params.algorithm is stub.EpAlgorithm.HIGH_THROUGHPUT
    knobs = [stub.HandleAlgoKnobTopKWeights(case.weights), *knobs]
    handle = fleet.create_handle(stub.HandleParams(torch.full_like(case.idx, -1)), knobs)
    handle.update(stub.HandleParams(case.idx))
    got = handle.dispatch(stub.DispatchInputParams([case.x]))
    handle.complete()
    used = check_rows(case, got, members, num_ranks, is_flat)
    done = handle.combine(stub.CombineInputParams([computed(case.rank, got)], out))
    handle.complete()
    assert isinstance(done, stub.CombineOutput) and (out is None or done.x is out)
    assert done.x.dtype == case.x.dtype and done.x.shape == case.x.shape
    near = 4 * torch.finfo(case.x.dtype).eps  # what each rank has is rounded, and their sum
    want = case.dense(members if left is None else left, num_ranks)
    torch.testing.assert_close(done.x.float(), want, rtol=near, atol=near)
    handle.destroy()
    return got, used


def random_idx(rank, num_experts, count, topk=3):
    """Different experts for a token, and none."""
    gen = torch.Generator().manual_seed(50 + rank)
    idx = torch.rand(count, num_experts, generator=gen).topk(topk, dim=1).indices
    idx[torch.rand(count, topk, generator=gen) < 0.3] = -1
    return idx


def ugly(rank, num_ranks):
    """Choices that few expect."""
    num_experts, count = LOCAL * num_ranks, (9, 0, MOST, 5)[rank % 4]
    last = torch.full((MOST, 3), -1)
    last[:, 2] = num_experts - 1
    return [
        random_idx(rank, num_experts, count),
        random_idx(rank, num_experts, count).int(),
        last,  # all tokens that there can be to one expert
        last[:, 2:],
        torch.full((MOST, 3), rank * LOCAL),  # one expert three times
        torch.full((4, 2), -1),
        torch.zeros((0, 3), dtype=torch.int64),  # no token anywhere
        torch.zeros((MOST if rank == 1 else 0, 3), dtype=torch.int64),
        torch.tensor([[num_experts, -7, 0], [2**32, 0, 2**40 + 1], [2**32, 2**40, -(2**32)]]),
    ]


def layer(rank, num_ranks, group, kind):
    with stub.installed(PLACE):
        fleet = made(rank, num_ranks, None, kind, group=group)
        for idx in ugly(rank, num_ranks):
            step(Case(rank, group, idx), fleet)
        for dtype in (torch.float32, torch.float16):
            idx = random_idx(rank, LOCAL * num_ranks, 7)
            case = Case(rank, group, idx, dtype)
            out = torch.empty(HIDDEN, 7, dtype=dtype).t() if rank else torch.empty_like(case.x)
            step(case, fleet, None, stub.HandleAlgoKnobSplitOperation(), out=out)
        fleet.destroy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_like_a_dense_layer(ranks, num_ranks, kind):
    ranks(layer, num_ranks, kind)


def counted(rank, num_ranks, group):
    """How many came is written where the caller wants it; but not of blocks."""
    case = Case(rank, group, random_idx(rank, LOCAL * num_ranks, 6))
    with stub.installed(PLACE):
        fleet = made(rank, num_ranks, None, FLAT, group=group)
        for target in (torch.zeros(1, dtype=torch.int32), torch.zeros((), dtype=torch.int64)):
            got, used = step(case, fleet, None, stub.HandleAlgoKnobNumReceivedTokens(target))
            assert got.recv_total_counter is target and int(target) == used > 0
        wrong = stub.HandleAlgoKnobNumReceivedTokens(torch.zeros(1))
        with pytest.raises(weft.InvalidArgument, match="NumReceivedTokens: torch.float32"):
            fleet.create_handle(stub.HandleParams(case.idx), [wrong])
        blocks = made(rank, num_ranks, None, BLOCKS, group=group)
        got, _ = step(case, blocks, None, stub.HandleAlgoKnobNumReceivedTokens(target))
        assert got.recv_total_counter is None


def test_how_many_rows_came(ranks):
    ranks(counted, 2)


def packed(rank, num_ranks, group, kind):
    """Rows of another width and type than those that come back, as kernels pack them."""
    case = Case(rank, group, random_idx(rank, LOCAL * num_ranks, 6))
    with stub.installed(PLACE):
        fleet = made(rank, num_ranks, None, kind, group=group)
        weights = stub.HandleAlgoKnobTopKWeights(case.weights.half())
        for sent in (case.x[:, :8], case.x.repeat(1, 2), case.x.view(torch.int16)):
            case.all_x = gather(group, sent.contiguous())
            handle = fleet.create_handle(stub.HandleParams(case.idx), [weights])
            got = handle.dispatch(stub.DispatchInputParams([sent]))
            assert got.expert_tensors.dtype == sent.dtype
            assert got.expert_tensors.shape == (num_ranks, MOST, sent.size(1))
            places = (got.recv_topk_idx >= 0).any(1)
            want = [case.all_x[s][t] for s in range(num_ranks) for t in case.arrivals(s)]
            assert torch.equal(got.expert_tensors.flatten(0, 1)[places], torch.stack(want))
            rows = torch.ones(num_ranks * MOST, HIDDEN, dtype=torch.bfloat16)
            done = handle.combine(stub.CombineInputParams([rows]))
            owners = [{int(e) // LOCAL for e in row if e >= 0} for row in case.idx]
            assert done.x[:, 0].tolist() == [len(found) for found in owners]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows(ranks, kind):
    ranks(packed, 2, kind)


def topology(rank, num_ranks, group, kind, folder):
    """Two ranks, three, and two; choices of ranks that are not there are none."""
    case = Case(rank, group, random_idx(rank, LOCAL * num_ranks, (9, 0, 7)[rank]))
    store = dist.FileStore(f"{folder}/store", num_ranks)
    with stub.installed(PLACE):
        sizes = {"num_experts": LOCAL * 3}
        capacity = stub.FleetAlgoKnobTopologyCapacity(3)
        quants = stub.FleetAlgoKnobQuantization(frozenset([stub.QuantType.FP8E4M3]))
        if rank < 2:
            fleet = made(rank, 2, store, kind, capacity, **sizes)
            with pytest.raises(NotImplementedError, match="Quantization"):
                fleet.update_topology(stub.BootstrapConfig(3, rank, None, store), [quants])
            step(case, fleet)
            fleet.update_topology(stub.BootstrapConfig(3, rank, None, store))
        else:
            fleet = made(rank, 3, store, kind, capacity, **sizes)
        step(case, fleet)
        gather(group, None)
        if rank < 2:
            fleet.update_topology(stub.BootstrapConfig(2, rank, None, store))
            step(case, fleet)
        fleet.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_fleets_grow_and_shrink(ranks, kind, tmp_path):
    ranks(topology, 3, kind, str(tmp_path))


def masks(rank, num_ranks, group):
    """A rank in the middle is masked, and taken in again; then it is lost, and the others go on."""
    case = Case(rank, group, random_idx(rank, LOCAL * num_ranks, (9, 6, 7)[rank]))
    with stub.installed(PLACE):
        knob = stub.FleetAlgoKnobFaultTolerance(timeout_ms=1000)
        fleet = made(rank, num_ranks, None, BLOCKS, knob, group=group)
        step(case, fleet)
        if rank != 1:
            fleet.set_active_mask([1, 0, 1])
            step(case, fleet, [0, 2])
            fleet.clear_faults(readmit=True)
        step(case, fleet)
        if rank != 1:  # which makes no call any more
            step(case, fleet, [0, 2])
            assert fleet.query_active_mask().tolist() == [1, 0, 1] and fleet.query_fault()
            step(case, fleet, [0, 2])
        gather(group, None)
        fleet.destroy()


def test_others_go_on_without_a_rank(ranks):
    ranks(masks, 3)


def leaves(rank, num_ranks, group, when):
    """A rank is lost between a plan and its rows, or a dispatch and its combine."""
    case = Case(rank, group, random_idx(rank, LOCAL * num_ranks, (9, 6, 7)[rank]))
    with stub.installed(PLACE):
        knob = stub.FleetAlgoKnobFaultTolerance()
        fleet = made(rank, num_ranks, None, BLOCKS, knob, group=group)
        step(case, fleet)
        if rank != 1:
            step(case, fleet, None if when == "combine" else [0, 2], left=[0, 2])
            step(case, fleet, [0, 2])
            return
        if when == "combine":
            knob = stub.HandleAlgoKnobTopKWeights(case.weights)
            handle = fleet.create_handle(stub.HandleParams(case.idx), [knob])
            handle.dispatch(stub.DispatchInputParams([case.x]))
        else:
            targets = torch.tensor([[1, 4, 7]] * 6)  # for what comes from this rank
            exchange = fleet.buffer.runtime.exchanges.last
            exchange.plan(targets, layout="expert_strided", expert_stride=MOST)
        fleet.destroy()


@pytest.mark.parametrize("when", ["plan", "combine"])
def test_others_end_a_call_without_a_rank(ranks, when):
    ranks(leaves, 3, when)


def dies(rank, num_ranks, group, kind):
    """No fault tolerance was asked for, and so no masks tell of it."""
    case = Case(rank, group, random_idx(rank, LOCAL * num_ranks, 6))
    with stub.installed(PLACE):
        fleet = made(rank, num_ranks, None, kind, group=group)
        step(case, fleet)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(weft.PeerError):
            step(case, fleet)


@pytest.mark.parametrize("kind", KINDS)
def test_fleets_end_with_a_rank_unless_they_may_lose_some(ranks, kind):
    ranks(dies, 3, kind, dying=(2,))


def refused(rank, num_ranks, group, kind):
    """All ranks hear what one gets wrong; and they go on."""
    case = Case(rank, group, random_idx(rank, LOCAL * num_ranks, 6))
    with stub.installed(PLACE):
        fleet = made(rank, num_ranks, None, kind, group=group)
        step(case, fleet)
        is_wrong = rank == 1
        many = torch.zeros(MOST + 1, 3, dtype=torch.int64) if is_wrong else case.idx
        for idx, x, weights, match in (
            (case.idx, case.x, None if is_wrong else case.weights, "no HandleAlgoKnobTopKWeights"),
            (many, case.x.new_zeros(len(many), HIDDEN), many.float(), "13 tokens .at most 12"),
            (case.idx, case.x[is_wrong:], case.weights, r"topk_ids has shape \[6, 3\]"),
            (case.idx, [case.x] if is_wrong else case.x, case.weights, "x is a list"),
        ):
            knobs = [] if weights is None else [stub.HandleAlgoKnobTopKWeights(weights)]
            handle = fleet.create_handle(stub.HandleParams(idx), knobs)
            with pytest.raises(weft.InvalidArgument, match=match):
                handle.dispatch(stub.DispatchInputParams([x]))
            with pytest.raises(weft.InvalidArgument, match="combine without a dispatch"):
                handle.combine(stub.CombineInputParams([case.x]))
        knobs = [stub.HandleAlgoKnobTopKWeights(case.weights)]
        handle = fleet.create_handle(stub.HandleParams(case.idx), knobs)
        got = handle.dispatch(stub.DispatchInputParams([case.x]))
        with pytest.raises(weft.InvalidArgument, match="x has shape"):
            handle.combine(stub.CombineInputParams([got.expert_tensors[is_wrong:]]))
        with pytest.raises(weft.InvalidArgument, match=r"topk_ids has shape \[5, 3\]"):
            handle.update(stub.HandleParams(case.idx[1:]))
        step(case, fleet)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_rank_gets_wrong(ranks, kind):
    ranks(refused, 2, kind)


def test_what_is_refused():
    with stub.installed(PLACE):
        tolerance = stub.FleetAlgoKnobFaultTolerance()
        quants = stub.FleetAlgoKnobQuantization(frozenset([stub.QuantType.FP8E4M3]))
        for kind, knob, match in (
            (FLAT, tolerance, "FaultTolerance with algorithm = HIGH_THROUGHPUT"),
            (FLAT, quants, "Quantization of .'FP8E4M3'. .expected"),
            (BLOCKS, quants, "Quantization of .'FP8E4M3'. .expected"),
        ):
            with pytest.raises(NotImplementedError, match=match):
                made(0, 1, None, kind, knob)
        other = stub.enum.Enum("Other", ["FLAT"]).FLAT
        for kind in ({"algorithm": other}, {"layout": other}):
            with pytest.raises(NotImplementedError, match="= FLAT .expected"):
                made(0, 1, None, kind)
