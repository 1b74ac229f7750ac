# SPDX-License-Identifier: Apache-2.0
"""How the ranks of an exchange on GPUs get in step again when one is lost, without a GPU: calls in
a model of such an exchange, and the doors with exchanges of CPUs that pretend to have lost a rank
which made no calls."""

import contextlib
import random
import threading
from types import SimpleNamespace

import flashinfer_stub as stub
import pytest
import torch
import torch.distributed as dist
from buffer_cases import NUM_MAX, low_latency_case
from nixl_cases import NUM_MAX as NIXL_MAX
from nixl_cases import connected, make_case, meeting
from nixl_cases import exchange as nixl_round

from weft import CallReport
from weft.compat import flashinfer, nixl_ep
from weft.compat.deep_ep.steps import Steps
from weft.errors import RanksLost


class Model:
    """The exchanges of all ranks, which are threads. In each era a rank makes so many calls, ended
    or cut short, before it hears that one is lost; all of them hear together."""

    def __init__(self, num_ranks, quotas):
        self.quotas = quotas  # [era][rank] calls of a door
        self.steps = [Steps() for _ in range(num_ranks)]
        self.launched = [0] * num_ranks  # in this era, as a GPU counts them
        self.made = [[[] for _ in range(num_ranks)] for _ in range(len(quotas) + 1)]
        self.meet = threading.Barrier(num_ranks, timeout=20)

    def call(self, rank, what, num_calls):
        """A call of the exchange, or two in one call of a door."""
        era = self.steps[rank].era
        made = self.made[era][rank]
        if era < len(self.quotas) and len(made) == self.quotas[era][rank]:
            self.meet.wait()
            behind = max(self.launched) - self.launched[rank]
            self.meet.wait()
            self.launched[rank] = 0
            self.steps[rank].hear(CallReport(era + 1, [], [], [], 0, behind))
            raise RanksLost("a rank is lost")
        self.launched[rank] += num_calls
        made.append(what)


class ModelPlan:
    def __init__(self, core, num_calls=0):
        self.era, self.core, self.num_calls = 0, core, num_calls


def run_program(model, rank, program):
    """program: ("dispatch", name, calls) or ("combine", name, _)."""
    plans, steps = {}, model.steps[rank]
    for place, (kind, name, num_calls) in enumerate(program):
        if kind == "dispatch":

            def dispatch(is_skipped, place=place, num_calls=num_calls):
                if is_skipped:
                    return (ModelPlan(None, num_calls),)
                model.call(rank, place, num_calls)
                return (ModelPlan(rank),)

            (plans[name],) = steps.dispatch(dispatch)
        else:
            brought = steps.combine(
                plans.pop(name), lambda place=place: model.call(rank, place, 1), lambda: None
            )
            assert brought is None


def random_program(choose, length):
    """Two micro-batches may take turns."""
    program, open_names = [], []
    for name in range(length):
        program.append(("dispatch", name, choose.choice([1, 2])))
        open_names.append(name)
        while len(open_names) > choose.choice([0, 1]):
            program.append(("combine", open_names.pop(0), 1))
    return program + [("combine", name, 1) for name in open_names]


@pytest.mark.parametrize("seed", range(40))
def test_ranks_make_the_same_calls_again_after_losses(seed):
    choose = random.Random(seed)
    num_ranks = choose.choice([2, 3, 4])
    program = random_program(choose, 30)
    quotas = [
        [choose.randint(0, 9) for _ in range(num_ranks)] for _ in range(choose.choice([1, 3]))
    ]
    model, faults = Model(num_ranks, quotas), []

    def live(rank):
        try:
            run_program(model, rank, program)
        except BaseException as error:
            faults.append(error)
            model.meet.abort()

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    # As far as they came, they made the same ones.
    for of_ranks in model.made:
        longest = max(of_ranks, key=len)
        assert all(calls == longest[: len(calls)] for calls in of_ranks)
    last = model.made[-1]
    assert last[0] and all(calls == last[0] for calls in last)


class Told:
    """An exchange that has lost a rank, and says so once."""

    is_between_gpu_domains = True  # nobody waits for its GPU then

    def __init__(self, behind, is_repeated=False):
        self.news = [CallReport(1, [], [], [], 0, behind, is_repeated)]

    def check(self):
        if self.news:
            Steps.of(self).hear(self.news.pop())
            raise RanksLost("a rank is lost")


def test_queries_hear_of_losses():
    exchange = Told(5)
    steps = Steps.of(exchange)
    steps.look(exchange)
    assert (steps.era, steps.behind) == (1, 5)
    steps.look(exchange)
    assert (steps.era, steps.behind) == (1, 5)


def test_calls_that_were_made_again_leave_plans_as_they_are():
    exchange = Told(0, is_repeated=True)
    steps = Steps.of(exchange)
    steps.look(exchange)
    assert (steps.era, steps.behind) == (0, 0)


class Pretended:
    """An exchange of CPUs whose next dispatches are cut short, as on a GPU whose kernels were
    stopped, and which then hears of the loss."""

    def __init__(self, exchange, num_cut, behind):
        self._exchange, self._left, self._behind = exchange, num_cut, behind
        self._has_heard = False
        for name in ("dispatch_blocks", "plan_and_dispatch", "combine"):
            setattr(exchange, name, self._instead_of(getattr(exchange, name)))

    def _instead_of(self, usual):
        def call(*given, is_skipped=False, **options):
            if is_skipped or self._left > 0:
                self._left -= 0 if is_skipped else 1
                return usual(*given, is_skipped=True, **options)
            if not self._has_heard:
                self._has_heard = True
                Steps.of(self._exchange).hear(CallReport(1, [], [], [], 0, self._behind))
                raise RanksLost("a rank is lost")
            return usual(*given, **options)

        return call


ROUND = 3  # calls of the exchange: plan, dispatch, combine
AHEAD = 2  # rounds that rank 0 has made before it hears, and the others have not


def nothing_comes(case, buffer, calls, most):
    """A round that is cut short or left out, with hooks."""
    dispatch, combine = calls
    stats = torch.full((case.local,), 5, dtype=torch.int32)
    given = (case.x, case.idx, most, case.num_experts, stats)
    for use_fp8 in (False, True):
        rows, counts, handle, _, hook = dispatch(*given, use_fp8=use_fp8, return_recv_hook=True)
        with contextlib.suppress(TypeError):  # None on a CPU, where all is done at once
            hook()
        assert counts.tolist() == [0] * case.local and torch.equal(stats, counts + 5)
        assert (handle[0] == -1).all() and (handle[1].long() & 0xFFFFFFFF == 0).all()
        if use_fp8:
            values, scales = rows
            assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
            rows = torch.full(values.shape, float("nan"), dtype=torch.bfloat16)
        out = torch.full_like(case.x, 7.0)
        got, _, hook = combine(rows, case.idx, case.weights, handle, out=out, return_recv_hook=True)
        with contextlib.suppress(TypeError):
            hook()
        assert got is out and not out.any()


def full_round(case, buffer):
    given = (case.x, case.idx, NUM_MAX, case.num_experts)
    rows, counts, handle, *_ = buffer.low_latency_dispatch(*given, use_fp8=False)
    wanted = [
        (torch.cat(case.all_idx) == case.rank * case.local + e).sum() for e in range(case.local)
    ]
    assert counts.tolist() == wanted
    ones = torch.where(handle.is_row.unsqueeze(2), 1.0, float("nan")).to(torch.bfloat16)
    rows = ones.expand(rows.shape).contiguous()
    out, *_ = buffer.low_latency_combine(rows, case.idx, torch.ones_like(case.weights), handle)
    kept = ((case.idx >= 0) & (case.idx < case.num_experts)).sum(1, keepdim=True)
    assert torch.equal(out.float(), kept.float().expand_as(out))


def low_latency(rank, num_ranks, group):
    case, buffer = low_latency_case(rank, num_ranks, group, enable_shrink=True, hidden=128)
    full_round(case, buffer)
    (exchange,) = buffer.runtime.exchanges._exchanges.values()
    num_cut = 2 * AHEAD if rank == 0 else 0
    Pretended(exchange, num_cut, 0 if rank == 0 else 2 * AHEAD * ROUND)
    calls = (buffer.low_latency_dispatch, buffer.low_latency_combine)
    for _ in range(AHEAD):
        nothing_comes(case, buffer, calls, NUM_MAX)
    for _ in range(3):
        full_round(case, buffer)
    assert Steps.of(exchange).behind == 0


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_low_latency_calls_are_left_out(ranks, num_ranks):
    ranks(low_latency, num_ranks)


def between_halves(rank, num_ranks, group):
    """A rank is lost between a dispatch and its combine, which then brings nothing on all ranks."""
    case, buffer = low_latency_case(rank, num_ranks, group, enable_shrink=True)
    full_round(case, buffer)
    given = (case.x, case.idx, NUM_MAX, case.num_experts)
    rows, _, handle, *_ = buffer.low_latency_dispatch(*given, use_fp8=False)
    (exchange,) = buffer.runtime.exchanges._exchanges.values()
    Pretended(exchange, 0, 0)
    out, *_ = buffer.low_latency_combine(rows, case.idx, case.weights, handle)
    assert out.shape == case.x.shape and not out.any()
    for _ in range(2):
        full_round(case, buffer)


def test_a_combine_by_a_plan_of_before_brings_nothing(ranks):
    ranks(between_halves, 2)


def nixl(rank, num_ranks, group, folder):
    case = make_case(rank, num_ranks, group)
    buffer = connected(rank, num_ranks, meeting(rank, num_ranks, group, "file", folder))
    nixl_round(case, buffer)
    (exchange,) = buffer.runtime.exchanges._exchanges.values()
    num_cut = 2 * AHEAD if rank == 0 else 0
    Pretended(exchange, num_cut, 0 if rank == 0 else 2 * AHEAD * ROUND)
    for _ in range(AHEAD):
        nothing_comes(case, buffer, (buffer.dispatch, buffer.combine), NIXL_MAX)
    nixl_round(case, buffer)
    assert Steps.of(exchange).behind == 0


def test_calls_of_nixl_ep_are_left_out(ranks, tmp_path):
    ranks(nixl, 2, str(tmp_path))


def test_ranks_of_calls_of_nixl_ep_after_a_loss():
    buffer = nixl_ep.Buffer(rank=0, tcp_store_group=dist.HashStore())
    buffer.update_memory_buffers(3, 2, 0)
    buffer._remote = [1, 2]
    exchanges = SimpleNamespace(lost=(), lost_on_gpus=(), going_on_gpus=list)
    buffer._runtimes[0, 1, 2] = SimpleNamespace(exchanges=exchanges)
    exchanges.lost = exchanges.lost_on_gpus = (1,)
    buffer._masked.add(1)
    buffer._lost.add(1)
    assert buffer._call_ranks() == (0, 1, 2)  # whose exchange goes on
    assert buffer._runtime() is buffer._runtimes[0, 1, 2]
    status = torch.empty(3, dtype=torch.int32)
    buffer.query_mask_buffer(status)
    assert status.tolist() == [0, 1, 0]
    buffer.update_mask_buffer(2, mask=True)
    assert buffer._call_ranks() == (0,)  # others meet
    buffer.clean_mask_buffer()
    assert buffer._call_ranks() == (0, 1, 2)
    exchanges.lost_on_gpus = ()  # as on CPUs, where those that are left meet anew
    assert buffer._call_ranks() == (0, 2)


def rank_blocks(rank, num_ranks, group):
    gen = torch.Generator().manual_seed(rank)
    idx = torch.rand(6, 3 * num_ranks, generator=gen).topk(2).indices
    x = torch.randn(6, 16, generator=gen).to(torch.bfloat16)
    weights = torch.rand(6, 2, generator=gen)
    with stub.installed("flashinfer.moe_ep"):
        flashinfer.register()
        sizes = stub.FleetParams(3 * num_ranks, 8, 16, layout=stub.EpLayout.RANK_MAJOR)
        bootstrap = stub.BootstrapConfig(num_ranks, rank, group, None)
        knobs = [stub.FleetAlgoKnobFaultTolerance()]
        fleet = stub.create_fleet(bootstrap, sizes, knobs, "weft")

        def step(is_empty):
            knobs = [stub.HandleAlgoKnobTopKWeights(weights)]
            handle = fleet.create_handle(stub.HandleParams(idx), knobs)
            got = handle.dispatch(stub.DispatchInputParams([x]))
            assert is_empty == (not got.expert_counts.any())
            assert is_empty == bool((got.recv_topk_idx == -1).all())
            ones = (got.recv_topk_idx >= 0).sum(1).to(torch.bfloat16).view(num_ranks, 8, 1)
            done = handle.combine(stub.CombineInputParams([ones.expand(-1, -1, 16).contiguous()]))
            assert torch.equal(done.x, torch.full_like(x, 0.0 if is_empty else 2.0))

        step(False)
        (exchange,) = fleet.buffer.runtime.exchanges._exchanges.values()
        num_cut = AHEAD if rank == 0 else 0
        Pretended(exchange, num_cut, 0 if rank == 0 else AHEAD * ROUND)
        for _ in range(AHEAD):
            step(True)
        for _ in range(2):
            step(False)


def test_calls_of_fleets_are_left_out(ranks):
    ranks(rank_blocks, 2)
