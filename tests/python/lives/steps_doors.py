# SPDX-License-Identifier: Apache-2.0
"""Steps of the drop-in interfaces. The normal and low-latency calls of `deep_ep` share one buffer,
as serving engines have it."""

from __future__ import annotations

from typing import Any

import torch
from life import Kept, Life, Wrong, near, same, step
from reference import Batch, Rows
from steps_exchange import check_rows, experts, is_wanted

import weft
from weft import fused_a2a
from weft.compat.deep_ep import Buffer, ElasticBuffer, HybridEPBuffer

MOST = [8, 16]  # tokens of a rank in a low-latency call


def batch_of(life: Life, **options) -> Batch:
    """A batch of one of the life's sizes."""
    return life.batch(*life.rng.choice(life.sizes), **options)


def async_flags(life: Life) -> dict[str, Any]:
    flags = life.rng.choice([{}, {}, {"async_finish": True}, {"allocate_on_comm_stream": True}])
    if flags.get("allocate_on_comm_stream"):
        flags |= {"async_finish": True, "previous_event": Buffer.capture()}
    return flags


def wait_for(event, flags: dict) -> None:
    if flags.get("async_finish") or flags.get("async_with_compute_stream"):
        event.current_stream_wait()


# Normal mode.


def both_modes(life: Life) -> Buffer:
    options = {"low_latency_mode": True, "explicitly_destroy": True}
    return life.buffer("deep_ep", lambda: Buffer(life.group, 1 << 20, 1 << 20, **options))


@step(8, lives="steady")
def normal(life: Life) -> None:
    buffer, batch, flags = both_modes(life), batch_of(life), async_flags(life)
    if life.chance(0.03):
        batch = batch_of(life, tokens=life.tokens(300))
    x, idx, weights = life.own_part(batch)
    rows = Rows(batch, life.rank, "rank_major")
    per_rank, per_host, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, batch.num_experts)
    alignment = life.rng.choice([1, 1, 8])
    given = (per_rank, per_host, in_rank, per_expert, idx, weights, alignment)
    worst = 0
    if life.chance(0.2):
        worst = sum(batch.tokens) + 3
    got, ids, got_weights, counts, handle, event = buffer.dispatch(
        x, None, *given, num_worst_tokens=worst, **flags
    )
    wait_for(event, flags)
    if worst:
        rows = Rows(batch, life.rank, "rank_major", budgets=[worst] * life.num_ranks)
    else:
        same("counts", counts, [-(-n // alignment) * alignment for n in rows.counts.tolist()])
    check_rows("rows", got, rows, batch.x)
    is_row = rows.is_row
    same("ids", ids.cpu(), rows.row_experts())
    same("weights", got_weights.cpu()[is_row], rows.row_weights(batch.weights)[is_row])
    kept = Kept(handle, rows, batch, buffer)
    if life.chance(0.8):
        normal_sums(life, kept, batch, got)
    if life.chance(0.4):
        life.keep("normal", kept)


def normal_sums(life: Life, kept: Kept, batch: Batch, got: torch.Tensor) -> None:
    flags = async_flags(life)
    row_weights = kept.rows.row_weights(batch.weights) if life.chance(0.5) else None
    y = experts(life, kept.rows, got)
    x, back, event = kept.holder.combine(y, kept.handle, life.there(row_weights), **flags)
    wait_for(event, flags)
    same("sums", x, kept.rows.sums(batch.of(life.rank, batch.x)))
    if row_weights is not None:
        want = torch.where(kept.rows.taken(), batch.of(life.rank, batch.weights), 0.0)
        same("weights", back, want)


@step(6, lives="steady")
def normal_again(life: Life) -> None:
    """A dispatch and a combine by a handle of before, whatever has been called since."""
    kept = life.found("normal")
    if kept is None:
        return
    batch, flags = kept.again(life), async_flags(life)
    x = life.there(batch.of(life.rank, batch.x))
    got, *_, event = kept.holder.dispatch(x, kept.handle, **flags)
    wait_for(event, flags)
    check_rows("rows", got, kept.rows, batch.x)
    normal_sums(life, kept, batch, got)


# Low latency.


class Sent:
    """A low-latency dispatch, whose hook is still to be called."""

    def __init__(self, life: Life, buffer: Buffer, batch: Batch, most: int, **flags) -> None:
        self.life, self.buffer, self.batch = life, buffer, batch
        x, idx, _ = life.own_part(batch)
        self.idx = idx.clone()
        stride = life.num_ranks * most
        self.rows = Rows(batch, life.rank, "expert_strided", stride=stride)
        is_wide = batch.hidden % 128 == 0
        self.is_fp8 = is_wide and life.chance(0.3)
        self.stats = torch.ones(batch.local, dtype=torch.int32, device=life.device)
        stats = self.stats if life.chance(0.4) else None
        self.got, self.count, self.handle, self.event, self.hook = buffer.low_latency_dispatch(
            x, self.idx, most, batch.num_experts, stats, use_fp8=self.is_fp8, **flags
        )
        self.has_stats, self.flags = stats is not None, flags

    def received(self) -> Kept:
        if self.hook is not None:
            self.hook()
        wait_for(self.event, self.flags)
        rows, batch = self.rows, self.batch
        same("counts", self.count, rows.counts.int())
        if self.has_stats:
            same("statistics", self.stats, rows.counts.int() + 1)
        if self.is_fp8:
            (codes, scales), is_row = self.got, rows.is_row
            scales = scales.cpu().reshape(len(is_row), -1).repeat_interleave(128, 1)
            got = codes.cpu().float().flatten(0, 1) * scales
            want, _ = rows.received(batch.x)
            largest = want.float().abs().amax(1, keepdim=True)
            near("FP8 rows", got[is_row], want[is_row], largest[is_row] / 14)
        else:
            check_rows("rows", self.got.flatten(0, 1), rows, batch.x)
        return Kept(self.handle, rows, batch, self.buffer, {"idx": self.idx})


class Summed:
    """A low-latency combine, whose hook is still to be called."""

    def __init__(self, life: Life, kept: Kept, **flags) -> None:
        """The experts' rows are made of other tokens, as far as the combine knows."""
        self.life, self.kept, self.flags = life, kept, flags
        batch = self.batch = kept.again(life)
        rows, _ = kept.rows.received(batch.x)
        y = life.there(rows * kept.rows.factors(rows.dtype)).view(batch.local, -1, batch.hidden)
        _, _, weights = life.own_part(batch)
        idx = kept.how["idx"]
        if life.chance(0.2):  # another tensor, its slots in another order
            own = torch.Generator().manual_seed(life.own.getrandbits(60))
            order = life.there(torch.rand(idx.shape, generator=own).argsort(1))
            idx, weights = idx.gather(1, order), weights.gather(1, order)
        how = life.rng.choice([{}, {}, {"out": torch.full_like(batch.of(life.rank, batch.x), 7)}])
        how = {name: life.there(one) for name, one in how.items()}
        if life.chance(0.2):
            kept.holder.get_next_low_latency_combine_buffer(kept.handle)[:] = y
            y, how["zero_copy"] = torch.zeros_like(y), True
        self.x, self.event, self.hook = kept.holder.low_latency_combine(
            y, idx, weights, kept.handle, **how, **flags
        )
        self.place = how.get("out")

    def received(self) -> None:
        if self.hook is not None:
            self.hook()
        wait_for(self.event, self.flags)
        batch = self.batch
        x, weights = (batch.of(self.life.rank, v) for v in (batch.x, batch.weights))
        same("sums", self.x, self.kept.rows.sums(x, weights=weights))
        if self.place is not None and self.place is not self.x:
            raise Wrong("out is not what was returned")


def low_latency_batch(life: Life) -> tuple[Batch, int]:
    most = life.rng.choice(MOST)
    tokens = life.tokens(most)
    return batch_of(life, kind="distinct", dtype=torch.bfloat16, tokens=tokens), most


def low_latency_flags(life: Life) -> dict[str, bool]:
    return life.rng.choice([{}, {}, {"return_recv_hook": True}, {"async_finish": True}])


@step(10, lives="steady")
def low_latency(life: Life) -> None:
    buffer = both_modes(life)
    kept = Sent(life, buffer, *low_latency_batch(life), **low_latency_flags(life)).received()
    for _ in range(life.rng.choice([0, 1, 1, 2])):
        Summed(life, kept, **low_latency_flags(life)).received()
    if life.chance(0.4):
        life.keep("low_latency", kept)


@step(4, lives="steady")
def low_latency_again(life: Life) -> None:
    """The sums of a handle of before."""
    kept = life.found("low_latency")
    if kept is not None:
        Summed(life, kept, **low_latency_flags(life)).received()


@step(4, lives="steady")
def two_at_a_time(life: Life) -> None:
    """Two low-latency batches whose hooks are called later; a normal call may come between."""
    buffer, hooks = both_modes(life), {"return_recv_hook": True}
    sent = [Sent(life, buffer, *low_latency_batch(life), **hooks) for _ in range(2)]
    life.rng.shuffle(sent)
    kept = [one.received() for one in sent]
    if life.chance(0.3):
        normal_again(life)
    sums = [Summed(life, one, **hooks) for one in kept]
    for one in life.rng.sample(sums, 2):
        one.received()


@step(1, lives="steady")
def combine_by_other_ids(life: Life) -> None:
    """Choices that are not the dispatch's are refused."""
    kept, culprit = life.found("low_latency"), life.rng.choice(life.members)
    if kept is None or kept.batch.num_experts < 2 or not kept.batch.tokens[culprit]:
        return

    def shifted(ids: torch.Tensor) -> torch.Tensor:
        return torch.where(ids >= 0, (ids + 1) % kept.batch.num_experts, -1)

    idx, ids = kept.how["idx"], kept.batch.of(culprit, kept.batch.idx)
    is_same = torch.equal(shifted(ids).sort(1).values, ids.sort(1).values)  # in another order
    other = idx.new_zeros(len(idx) + 1, idx.size(1)) if is_same else shifted(idx)
    rows = torch.zeros(kept.handle.shape, dtype=torch.bfloat16, device=life.device)
    weights = torch.ones(idx.shape, device=life.device)

    def call(is_wrong: bool) -> None:
        kept.holder.low_latency_combine(rows, other if is_wrong else idx, weights, kept.handle)

    life.refused(culprit, call, by=kept.handle.plan, is_told_next=not is_same)


@step(1, lives="steady")
def slots_in_place(life: Life) -> None:
    """A token's slots, turned in the memory that dispatch was given: right or refused."""
    buffer = both_modes(life)
    kept = Sent(life, buffer, *low_latency_batch(life)).received()
    idx, batch = kept.how["idx"], kept.batch
    idx.copy_(idx.flip(1))
    rows, _ = kept.rows.received(batch.x)
    y = life.there(rows * kept.rows.factors(rows.dtype)).view(batch.local, -1, batch.hidden)
    _, _, weights = life.own_part(batch)
    try:
        x, _, _ = buffer.low_latency_combine(y, idx, weights.flip(1), kept.handle)
        if x.is_cuda:  # where a rank hears of it by its next call, if there is anything wrong
            torch.cuda.synchronize()
            kept.handle.plan.calls.check()
    except weft.InvalidArgument:
        return
    own = batch.of(life.rank, batch.x)
    want = kept.rows.sums(own, weights=batch.of(life.rank, batch.weights))
    same("sums", x, want)


@step(2, lives="steady", device="cpu")
def wrong_in_buffer(life: Life) -> None:
    """A call of the buffer with a wrong argument on one rank, of sizes that it has had last."""
    batch, most = low_latency_batch(life)
    Sent(life, both_modes(life), batch, most).received()
    wrong_call(life, batch, most)


@step(1, lives="steady", device="cpu")
def wrong_among_sizes(life: Life) -> None:
    """A wrong argument on one rank, in a call of other sizes than the one before, known or not."""
    wrong_call(life, *low_latency_batch(life))


def wrong_call(life: Life, batch: Batch, most: int) -> None:
    buffer, culprit = both_modes(life), life.rng.choice(life.members)
    x, idx, weights = life.own_part(batch)
    more = x.new_zeros(most + 1, batch.hidden), idx.new_zeros(most + 1, batch.topk)
    # Rows of another width are heard of by the deadline only, where a buffer has several exchanges.
    wrong = life.rng.choice([(x, idx.float()), (x.double(), idx), more])

    def low_latency(is_wrong: bool) -> None:
        given = wrong if is_wrong else (x, idx)
        buffer.low_latency_dispatch(*given, most, batch.num_experts, use_fp8=False)

    def normal(is_wrong: bool) -> None:
        layout = buffer.get_dispatch_layout(idx, batch.num_experts)
        per_rank, per_host, per_expert, in_rank, _ = layout
        in_rank = in_rank[:-1] if len(x) else in_rank.new_zeros(1, life.num_ranks)
        in_rank = in_rank if is_wrong else layout[3]
        buffer.dispatch(x, None, per_rank, per_host, in_rank, per_expert, idx, weights)

    life.refused(culprit, life.rng.choice([low_latency, normal]))


@step(0.5, lives="steady")
def new_buffer(life: Life) -> None:
    """A buffer ends; its handles are dropped before or after, or by then have been."""
    name = life.rng.choice(["deep_ep", "elastic", "hybrid"])
    buffer = life.buffers.pop(name, None)
    if buffer is None:
        return
    life.forget(buffer, "graph")
    if name == "deep_ep" and life.own.random() < 0.5:
        buffer.destroy()
    life.forget(buffer, "normal", "low_latency", "elastic", "permuted", "hybrid")


# HybridEP.


def hybrid_buffer(life: Life) -> HybridEPBuffer:
    return life.buffer("hybrid", lambda: HybridEPBuffer(life.group, 128, 16, 2))


def probabilities(life: Life, batch: Batch) -> torch.Tensor:
    return life.there(batch.spread(life.rank, batch.of(life.rank, batch.weights)))


@step(6, lives="steady")
def permuted(life: Life) -> None:
    """A row for each route, by expert."""
    buffer, batch = hybrid_buffer(life), batch_of(life, kind="map")
    x, idx, weights = life.own_part(batch)
    pad = life.rng.choice([None, 4, 8])
    options, how = {"pad_multiple": pad}, {"pad": pad or 1}
    if life.chance(0.3):
        budget = life.rng.choice([8, 64])
        options |= {"non_blocking": True, "num_permuted_tokens": budget}
        how["budgets"] = [budget] * life.num_ranks
    if life.chance(0.5):
        options |= {"routing_map": is_wanted(life, batch), "probs": probabilities(life, batch)}
    else:
        options |= {"topk_idx": idx, "topk_weights": weights}
    per_rank = batch.local
    got, probs, _, counts, handle = buffer.dispatch_with_permute(
        hidden=x, num_of_experts_per_rank=per_rank, **options
    )
    rows = Rows(batch, life.rank, **how)
    kept = Kept(handle, rows, batch, buffer)
    if "budgets" not in how:
        same("counts", counts, rows.padded)
    permuted_sums(life, kept, batch, got, probs)
    if life.chance(0.4):
        life.keep("permuted", kept)


def permuted_sums(life: Life, kept: Kept, batch: Batch, got, probs) -> None:
    rows = kept.rows
    check_rows("rows", got, rows, batch.x)
    defined = rows.is_defined
    row_probs = rows.row_weights(batch.weights).view(-1)
    same("probabilities", probs.cpu()[defined], row_probs[defined])
    back = life.there(row_probs) if life.chance(0.5) else None
    y = experts(life, rows, got)
    x, dense = kept.holder.combine_with_unpermute(hidden=y, probs=back, handle=kept.handle)
    same("sums", x, rows.sums(batch.of(life.rank, batch.x)))
    if back is not None:
        values = torch.where(rows.taken(), batch.of(life.rank, batch.weights), 0.0)
        same("dense probabilities", dense, batch.spread(life.rank, values))


@step(4, lives="steady")
def permuted_again(life: Life) -> None:
    kept = life.found("permuted")
    if kept is not None:
        batch = kept.again(life)
        x, probs = life.there(batch.of(life.rank, batch.x)), probabilities(life, batch)
        got, probs, *_ = kept.holder.dispatch_with_permute(
            hidden=x, probs=probs, handle=kept.handle
        )
        permuted_sums(life, kept, batch, got, probs)


@step(3, lives="steady")
def hybrid(life: Life) -> None:
    """A row for each token on a rank; by a handle of before, perhaps."""
    kept = life.found("hybrid") if life.chance(0.4) else None
    buffer = hybrid_buffer(life) if kept is None else kept.holder
    batch = batch_of(life, kind="map") if kept is None else kept.again(life)
    x, probs = life.there(batch.of(life.rank, batch.x)), probabilities(life, batch)
    if kept is None:
        got, row_probs, _, handle = buffer.dispatch(
            x, probs=probs, routing_map=is_wanted(life, batch)
        )
        kept = Kept(handle, Rows(batch, life.rank, "rank_major"), batch, buffer)
        life.keep("hybrid", kept)
    else:
        got, row_probs, _, _ = buffer.dispatch(x, probs=probs, handle=kept.handle)
    check_rows("rows", got, kept.rows, batch.x)
    y = experts(life, kept.rows, got)
    x, dense = buffer.combine(y, row_probs, kept.handle)
    same("sums", x, kept.rows.sums(batch.of(life.rank, batch.x)))
    same("dense probabilities", dense, probs.cpu())


# ElasticBuffer.


@step(6, lives="steady")
def elastic(life: Life) -> None:
    """Rows by rank or by expert, in a new way or by a handle of before."""
    kept = life.found("elastic") if life.chance(0.4) else None
    flags = {"async_with_compute_stream": life.chance(0.3)}
    if kept is None:
        options = {"num_max_tokens_per_rank": 16, "explicitly_destroy": False}
        buffer = life.buffer("elastic", lambda: ElasticBuffer(life.group, **options))
        batch, expand = batch_of(life, kind="distinct"), life.chance(0.5)
        x, idx, weights = life.own_part(batch)
        pad = life.rng.choice([1, 4])
        made = {"num_experts": batch.num_experts, "expert_alignment": pad, "do_expand": expand}
        got, ids, row_weights, handle, event = buffer.dispatch(x, idx, weights, **made, **flags)
        how = {"pad": pad} if expand else {"layout": "rank_major"}
        kept = Kept(handle, Rows(batch, life.rank, **how), batch, buffer, {"expand": expand})
        life.keep("elastic", kept)
    else:
        buffer, batch = kept.holder, kept.again(life)
        x, _, weights = life.own_part(batch)
        got, ids, row_weights, _, event = buffer.dispatch(
            x, topk_weights=weights, handle=kept.handle, **flags
        )
    wait_for(event, flags)
    rows, expand = kept.rows, kept.how["expand"]
    check_rows("rows", got, rows, batch.x)
    want = rows.row_weights(batch.weights)
    if expand:
        same("row weights", row_weights, want.view(-1))
    else:
        same("ids", ids, rows.row_experts())
        same("row weights", row_weights, want)
    y = experts(life, rows, got)
    x, back, event = buffer.combine(y, kept.handle, row_weights, **flags)
    wait_for(event, flags)
    same("sums", x, rows.sums(batch.of(life.rank, batch.x)))
    same("weights", back, torch.where(rows.taken(), batch.of(life.rank, batch.weights), 0.0))


# Functions with gradients.


@step(6, lives="steady")
def fused(life: Life) -> None:
    """Forward and backward of a layer around fused_dispatch and fused_combine."""
    batch, dispatch, combine = batch_of(life), fused_a2a.fused_dispatch, fused_a2a.fused_combine
    x, idx, weights = life.own_part(batch)
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    flags = async_flags(life)
    flags.pop("previous_event", None)
    got, ids, row_weights, counts, handle = dispatch(
        x, idx, weights, batch.num_experts, life.group, **flags
    )
    rows = Rows(batch, life.rank, "rank_major")
    check_rows("rows", got, rows, batch.x)
    same("ids", ids, rows.row_experts())
    same("weights", row_weights, rows.row_weights(batch.weights))
    same("counts", counts, rows.counts)
    out, _ = combine(experts(life, rows, got), life.group, handle, **flags)
    same("sums", out, rows.sums(batch.of(life.rank, batch.x)))
    if life.chance(0.3):
        return  # no rank goes back
    upstream = batch.again(life.gen)
    up_weights = rows.row_weights(upstream.weights)
    given = (upstream.of(life.rank, upstream.x), up_weights)
    torch.autograd.backward([out, row_weights], life.there(*given))
    same("gradient of x", x.grad, rows.sums(given[0]))
    want = torch.where(rows.taken(), upstream.of(life.rank, upstream.weights), 0.0)
    same("gradient of weights", weights.grad, want)
