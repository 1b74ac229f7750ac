# SPDX-License-Identifier: Apache-2.0
"""Steps of weft.Exchange: plans made, kept and used again, every layout, order and format."""

from __future__ import annotations

import contextlib
import gc
import resource
from pathlib import Path

import torch
from life import Held, Kept, Life, Wrong, near, same, step
from reference import FACTORS, Batch, Rows

import weft

LAYOUTS = ["expert_major", "expert_major", "rank_major", "expert_strided"]
WIRES = {"fp8": 1 / 14, "logfmt10": 1 / 30}  # the largest error of a number, of its group's largest


def choices_of(life: Life, held: Held, kind: str) -> tuple[dict, dict]:
    """Options of a plan, and the same for `Rows`."""
    rng = life.rng
    layout = rng.choice(LAYOUTS)
    options, rows = {"layout": layout}, {"layout": layout}
    if layout == "expert_major":
        options["pad_multiple"] = rows["pad"] = rng.choice([1, 1, 4, 8])
    if layout == "expert_strided":
        options["expert_stride"] = rows["stride"] = rng.choice([0, 3, 40])
    elif life.chance(0.3):
        budget = rng.choice([1, 5, 16, 200]) * rows.get("pad", 1)
        options["row_budget"], rows["budgets"] = budget, [budget] * life.num_ranks
    if layout != "rank_major" and life.chance(0.3):
        options["order"] = "topk"
    return options, rows


def batch_for(life: Life, held: Held, options: dict, kind: str) -> Batch:
    """Now and then too large for the exchange, which grows where it can hear of it."""
    most, topk = life.rng.choice([12] * 12 + [40, 100]), life.rng.choice([1, 2, 3, 4, 6])
    is_given = "row_budget" in options or options.get("expert_stride", 0) > 0
    if life.device.type == "cuda" and is_given:
        most, topk = min(most, held.exchange.max_tokens), min(topk, held.exchange.max_topk)
    tokens = life.tokens(most)
    return life.batch(held.hidden, held.num_experts, kind, topk, tokens)


def planned(life: Life) -> Kept:
    held = life.held()
    kind = life.rng.choice(["any", "any", "map"])
    options, how = choices_of(life, held, kind)
    batch = batch_for(life, held, options, kind)
    _, idx, weights = life.own_part(batch)
    if kind == "map":
        routing = {"routing_map": is_wanted(life, batch)}
        weights = life.there(batch.spread(life.rank, batch.of(life.rank, batch.weights)))
    else:
        routing = {"topk_idx": idx.int() if life.chance(0.2) else idx}
    plan = held.exchange.plan(weights=weights, **routing, **options)
    rows = Rows(batch, life.rank, **how, alive=held.alive())
    check_plan(plan, rows, life.device)
    return Kept(plan, rows, batch, held, options)


def is_wanted(life: Life, batch: Batch) -> torch.Tensor:
    """bool [T, E]."""
    idx = batch.of(life.rank, batch.idx)
    return life.there(batch.spread(life.rank, (idx >= 0).float()) > 0)


def check_plan(plan: weft.Plan, rows: Rows, device: torch.device) -> None:
    same("num_rows", plan.num_rows, rows.num_rows)
    if device.type == "cpu" or rows.layout != "rank_major":  # a GPU counts dropped routes there
        same("rows_per_expert", plan.rows_per_expert, rows.counts)
    same("overflow", int(plan.overflow), int(rows.overflow))
    if rows.layout != "expert_strided":
        same("required_rows", plan.required_rows, rows.required)


def check_rows(what, got, rows: Rows, values, alive=()) -> None:
    want, defined = rows.received(values, alive)
    same(f"{what}: number", got.size(0), rows.num_rows)
    same(what, got.cpu()[defined], want[defined])


def weights_of(life: Life, kept: Kept, batch: Batch) -> torch.Tensor:
    """Weights as the source has them: [T, K], or [T, E] beside a map."""
    weights = batch.of(life.rank, batch.weights)
    return life.there(batch.spread(life.rank, weights) if batch.kind == "map" else weights)


def row_weights(kept: Kept, batch: Batch, alive=()) -> torch.Tensor:
    return kept.rows.row_weights(batch.weights, kept.handle.row_weight_cols, alive)


def returned_weights(life: Life, kept: Kept, batch: Batch, values, alive=()) -> torch.Tensor:
    """Weights [T, K], or [T, E] beside a map, that come back by the routes that lead anywhere."""
    values = torch.where(kept.rows.taken(alive), batch.of(life.rank, values), 0.0)
    return batch.spread(life.rank, values) if batch.kind == "map" else values


def is_narrow(held: Held, batch: Batch) -> bool:
    """True if rows can become smaller on the way."""
    return batch.dtype == torch.bfloat16 and held.hidden % 128 == 0


def experts(life: Life, rows: Rows, moved: torch.Tensor) -> torch.Tensor:
    """Rows that the experts make of rows; NaN where there is none to read."""
    return moved * life.there(rows.factors(moved.dtype))


def dispatched(life: Life, kept: Kept, batch: Batch) -> torch.Tensor:
    """Rows of the batch by a plan; with or without weights and scales."""
    plan, rows, held = kept.handle, kept.rows, kept.holder
    x = life.there(batch.of(life.rank, batch.x))
    weights = weights_of(life, kept, batch) if life.chance(0.5) else None
    scales = life.there(batch.of(life.rank, batch.idx)) if life.chance(0.2) else None
    out = weft.dispatch(plan, x, weights, scales)
    alive = held.alive()
    check_rows("rows", out.rows, rows, batch.x, alive)
    if weights is not None:
        want, defined = row_weights(kept, batch, alive), rows.is_defined
        same("row weights", out.weights.cpu()[defined], want[defined])
    if scales is not None:
        got, (want, defined) = out.scales.cpu(), rows.received(batch.idx, alive)
        same("scales", got[defined & rows.is_row], want[defined & rows.is_row])
    return out.rows


def combined(life: Life, kept: Kept, batch: Batch, moved: torch.Tensor) -> None:
    """Combines what the experts made of the rows, and checks the sums at their tokens."""
    plan, rows, held = kept.handle, kept.rows, kept.holder
    y, x = experts(life, rows, moved), batch.of(life.rank, batch.x)
    order = kept.how.get("order", "rank")
    how = life.rng.choice(["plain", "plain", "weights", "plan", "source", "out", "wire"])
    is_routed = rows.layout != "rank_major"
    if how == "plan" and is_routed:
        out = weft.combine(plan, y, scale="plan").x
        by = batch_of_plan = kept.batch.of(life.rank, kept.batch.weights)
        want = rows.sums(x, weights=batch_of_plan, order=order, alive=held.alive())
    elif how == "source" and is_routed and batch.kind != "map":
        by = batch.of(life.rank, batch.weights)
        given = {"scale": "source", "source_weights": life.there(by)}
        out = weft.combine(plan, y, **given).x
        want = rows.sums(x, weights=by, order=order, alive=held.alive())
    elif how == "weights":
        out, back = weft.combine(plan, y, life.there(row_weights(kept, batch)))
        want = rows.sums(x, order=order, alive=held.alive())
        want_weights = returned_weights(life, kept, batch, batch.weights, held.alive())
        same("weights", back, want_weights)
    elif how == "out":
        place = torch.full(x.shape, 7.0, dtype=x.dtype, device=life.device)
        out = held.exchange.combine(plan, y, out=place).x
        want = rows.sums(x, order=order, alive=held.alive())
        same("the memory that was given", place, want)
    elif how == "wire" and order == "rank" and is_narrow(held, batch):
        wire = life.rng.choice(list(WIRES))
        out = weft.combine(plan, y, wire=wire).x
        want = rows.sums(x, order=order, alive=held.alive())
        largest = rows.sums(x.abs(), torch.float32).amax(1, keepdim=True)
        return near(f"sums by {wire}", out, want, (WIRES[wire] + 1 / 100) * largest)
    else:
        out = weft.combine(plan, y).x
        want = rows.sums(x, order=order, alive=held.alive())
    return same(f"sums ({how})", out, want)


@step(14)
def plan(life: Life) -> None:
    """A plan, used at once, and perhaps kept."""
    kept = planned(life)
    combined(life, kept, kept.batch, dispatched(life, kept, kept.batch))
    if life.chance(0.5):
        life.keep("plan", kept)


@step(16)
def plan_again(life: Life) -> None:
    """A plan of before, whatever has been called since."""
    kept = life.found("plan")
    if kept is not None:
        batch = kept.again(life)
        combined(life, kept, batch, dispatched(life, kept, batch))


@step(6)
def plans_interleaved(life: Life) -> None:
    """Two dispatches, then their combines the other way around."""
    one, other = life.found("plan"), life.found("plan")
    if one is not None:
        batches = [one.again(life), other.again(life)]
        moved = [dispatched(life, *both) for both in zip((one, other), batches)]
        combined(life, other, batches[1], moved[1])
        combined(life, one, batches[0], moved[0])


@step(10)
def plan_and_dispatch(life: Life) -> None:
    held = life.held()
    options, how = choices_of(life, held, "any")
    batch = batch_for(life, held, options, "any")
    x, idx, weights = life.own_part(batch)
    made, out = weft.plan_and_dispatch(held.exchange, idx, x, weights, **options)
    rows = Rows(batch, life.rank, **how, alive=held.alive())
    check_plan(made, rows, life.device)
    check_rows("rows", out.rows, rows, batch.x)
    defined = rows.is_defined
    same("row weights", out.weights.cpu()[defined], rows.row_weights(batch.weights)[defined])
    kept = Kept(made, rows, batch, held, options)
    if life.chance(0.8):  # else nothing ever comes back
        y, back = experts(life, rows, out.rows), life.there(rows.row_weights(batch.weights))
        got, got_weights = weft.combine(made, y, back)
        x, order = batch.of(life.rank, batch.x), options.get("order", "rank")
        same("sums", got, rows.sums(x, order=order, alive=held.alive()))
        alive = held.alive()
        same("weights", got_weights, returned_weights(life, kept, batch, batch.weights, alive))
    if life.chance(0.3):
        life.keep("plan_and_dispatch", kept)


@step(8)
def gradients(life: Life) -> None:
    """Forward and backward, by a plan of before or a new one."""
    kept = (life.found("plan") if life.chance(0.5) else None) or planned(life)
    plan, rows, held, batch = kept.handle, kept.rows, kept.holder, kept.again(life)
    order = kept.how.get("order", "rank")
    upstream, up_weights = batch.again(life.gen), batch.weights.flip(0)
    x = life.there(batch.of(life.rank, batch.x)).clone().requires_grad_()
    weights = weights_of(life, kept, batch).clone().requires_grad_()
    moved, moved_weights, _ = weft.dispatch(plan, x, weights)
    y = experts(life, rows, moved)
    out, back = weft.combine(plan, y, moved_weights)
    own, g = batch.of(life.rank, batch.x), upstream.of(life.rank, upstream.x)
    alive = held.alive()
    same("sums", out, rows.sums(own, order=order, alive=alive))
    same("weights", back, returned_weights(life, kept, batch, batch.weights, alive))
    gw = batch.of(life.rank, up_weights)
    gw = batch.spread(life.rank, gw) if batch.kind == "map" else gw
    torch.autograd.backward([out, back], life.there(g, gw))
    alive = held.alive()
    same("gradient of x", x.grad, rows.sums(g, order=order, alive=alive))
    want = returned_weights(life, kept, batch, up_weights, alive)
    same("gradient of weights", weights.grad, want)


@step(3, lives="steady")
def bytes_and_formats(life: Life) -> None:
    """Rows that are bytes, and rows that become smaller on the way."""
    kept = planned(life)
    batch, rows, plan = kept.batch, kept.rows, kept.handle
    if not is_narrow(kept.holder, batch):
        values = (batch.x.float() * 64).to(torch.int8).view(torch.uint8)
        columns = values.shape[1]
        out = weft.dispatch(plan, life.there(batch.of(life.rank, values)))
        want, defined = rows.received(values)
        same("columns", columns, out.rows.size(1))
        return same("bytes", out.rows.cpu()[defined], want[defined])
    quantise = life.rng.choice(["e4m3", "e5m2", "mxfp8"])
    out = weft.dispatch(plan, life.there(batch.of(life.rank, batch.x)), quantise=quantise)
    scales = out.scales.cpu()
    if quantise == "mxfp8":
        scales = torch.exp2(scales.float() - 127)
    group = batch.hidden // scales.size(1)
    got = out.rows.cpu().float() * scales.float().repeat_interleave(group, 1)
    want, _ = rows.received(batch.x)
    largest = want.float().abs().unflatten(1, (-1, group)).amax(2).repeat_interleave(group, 1)
    bound = {"e4m3": 1 / 14, "e5m2": 1 / 7, "mxfp8": 1 / 14}[quantise]
    is_row = rows.is_row
    return near(f"rows by {quantise}", got[is_row], want[is_row], bound * largest[is_row])


@step(2, lives="steady")
def replicas(life: Life) -> None:
    """Replicas of popular experts change where rows go, but no sum by choice."""
    held = life.held()
    batch = life.batch(held.hidden, held.num_experts)
    x, idx, _ = life.own_part(batch)
    plan = held.exchange.plan(idx, order="topk", balance=life.rng.choice([1, 2]))
    local = held.num_experts // life.num_ranks
    there = torch.arange(life.rank * local, (life.rank + 1) * local)
    there = torch.cat([there, plan.placement[life.rank].long()])
    moved = weft.dispatch(plan, x).rows
    each = FACTORS[there].repeat_interleave(plan.rows_per_expert.cpu())
    same("rows", moved.size(0), len(each))
    y = moved * life.there(each.to(moved.dtype).unsqueeze(1))
    want = Rows(batch, life.rank).sums(batch.of(life.rank, batch.x), order="topk")
    return same("sums", weft.combine(plan, y).x, want)


# What is made and dropped.


@step(1.5, lives="steady")
def new_exchange(life: Life) -> None:
    if len(life.exchanges) > 2:
        gone = life.exchanges.pop(life.rng.randrange(len(life.exchanges)))
        life.forget(gone, "graph")
        if life.chance(0.5):
            gone.exchange.close()  # its plans can still be used
        else:
            life.forget(gone, "plan", "plan_and_dispatch")
    life.new_exchange()


@step(1)
def drop(life: Life) -> None:
    """Some of what was kept is gone, its memory on each rank at its own time."""
    for there in life.kept.values():
        if there and life.chance(0.5):
            del there[life.rng.randrange(len(there))]
    if life.own.random() < 0.2:
        gc.collect()


# Calls that are refused on all ranks.


def wrong_dispatch(life: Life, kept: Kept, culprit: int) -> None:
    x = life.there(kept.batch.of(life.rank, kept.batch.x))
    wrong = life.rng.choice(
        [
            x.new_zeros(len(x) + 1, x.size(1)),
            x.double(),
            x.new_zeros(len(x), x.size(1) + 3),
            None,
            x.unsqueeze(0).unsqueeze(0),
        ]
    )
    plan = kept.handle
    life.refused(culprit, lambda is_wrong: weft.dispatch(plan, wrong if is_wrong else x), by=plan)


def wrong_combine(life: Life, kept: Kept, culprit: int) -> None:
    rows = torch.zeros(kept.rows.num_rows, kept.holder.hidden, device=life.device)
    wrong = [rows.new_zeros(len(rows) + 1, rows.size(1)), rows.int(), "rows"]
    how = life.rng.choice([{"wrong": one} for one in wrong] + [{"scale": "twice"}, {"wire": 3}])
    wrong = how.pop("wrong", rows)
    is_taken = isinstance(wrong, str)

    def call(is_wrong: bool) -> None:
        if not is_wrong:
            weft.combine(kept.handle, rows)
        elif is_taken:
            kept.holder.exchange.combine(kept.handle, wrong)
        else:
            weft.combine(kept.handle, wrong, **how)

    life.refused(culprit, call, by=kept.handle)


def wrong_plan(life: Life, held: Held, culprit: int) -> None:
    batch = life.batch(held.hidden, held.num_experts, tokens=[3] * life.num_ranks)
    idx = life.there(batch.of(life.rank, batch.idx))
    wrong = life.rng.choice(
        [
            {"topk_idx": torch.full_like(idx, held.num_experts + 7)},
            {"topk_idx": idx.float()},
            {"topk_idx": idx.unsqueeze(0)},
            {"topk_idx": idx, "layout": "sideways"},
            {"topk_idx": idx, "pad_multiple": -1},
            {"topk_idx": None},
        ]
    )
    right = {"topk_idx": idx}
    life.refused(culprit, lambda is_wrong: held.exchange.plan(**(wrong if is_wrong else right)))


def wrong_one_call(life: Life, held: Held, culprit: int) -> None:
    batch = life.batch(held.hidden, held.num_experts, tokens=[3] * life.num_ranks)
    x, idx, weights = life.own_part(batch)
    wrong = life.rng.choice([(idx, x[:2], weights), (idx, x, weights[:1]), (idx + 99, x, weights)])

    def call(is_wrong: bool) -> None:
        weft.plan_and_dispatch(held.exchange, *(wrong if is_wrong else (idx, x, weights)))

    life.refused(culprit, call, by=held.exchange)


@step(3)
def wrong_argument(life: Life) -> None:
    """A call with a wrong argument on one rank is refused on all; they go on."""
    culprit, kept = life.rng.choice(life.members), life.found("plan")
    verb = life.rng.choice([wrong_dispatch, wrong_combine, wrong_plan, wrong_one_call])
    if verb in (wrong_plan, wrong_one_call):
        verb(life, life.held(), culprit)
    elif kept is not None:
        verb(life, kept, culprit)


@step(2)
def refuse(life: Life) -> None:
    """A rank says that it cannot make the call of the others."""
    culprit, kept = life.rng.choice(life.members), life.found("plan")
    verb = life.rng.choice(["plan", "plan_and_dispatch", "dispatch", "combine"])
    reason = f"step {life.number} is not for this rank"
    if verb in ("dispatch", "combine"):
        if kept is None:
            return
        held, plan = kept.holder, kept.handle
        x = life.there(kept.batch.of(life.rank, kept.batch.x))
        rows = torch.zeros(plan.num_rows, held.hidden, device=life.device)
    else:
        held, plan = life.held(), None
        x, idx, _ = life.own_part(life.batch(held.hidden, held.num_experts))

    def call(is_wrong: bool) -> None:
        if is_wrong:
            held.exchange.refuse(verb, reason, plan)
            raise weft.InvalidArgument(reason)
        elif verb == "plan":
            held.exchange.plan(idx)
        elif verb == "plan_and_dispatch":
            weft.plan_and_dispatch(held.exchange, idx, x)
        elif verb == "dispatch":
            weft.dispatch(plan, x)
        else:
            weft.combine(plan, rows)

    life.refused(culprit, call, reason, plan)


@step(1)
def exception_between(life: Life) -> None:
    """The caller's own exception between two calls; what it has kept goes later, or never."""
    kept = life.found("plan")
    if kept is None:
        return
    try:
        moved = dispatched(life, kept, kept.again(life))
        raise RuntimeError(f"{len(moved)} rows were too many for the caller")
    except RuntimeError as error:
        life.buffers["error"] = error  # with its frames


@step(2)
def other_calls(life: Life) -> None:
    """One rank plans while the others combine: all are told."""
    culprit = life.rng.choice(life.members)
    if len(life.members) == 1:
        return
    kept = planned(life)  # an exchange that has grown since does not hear of calls by older plans
    idx = torch.zeros(2, 1, dtype=torch.int64, device=life.device)
    rows = torch.zeros(kept.rows.num_rows, kept.holder.hidden, device=life.device)
    try:
        if life.rank == culprit:
            kept.holder.exchange.plan(idx)
        else:
            weft.combine(kept.handle, rows)
        if rows.is_cuda:
            torch.cuda.synchronize()
            kept.handle.calls.check()
    except weft.InvalidArgument:
        return
    raise Wrong("ranks that made different calls were not told so")


@step(2)
def out_with_gaps(life: Life) -> None:
    """Memory for sums that has gaps is written, or refused."""
    kept = life.found("plan")
    if kept is None:
        return
    batch, rows = kept.again(life), kept.rows
    y, x = experts(life, rows, dispatched(life, kept, batch)), batch.of(life.rank, batch.x)
    place = torch.full((len(x), 2 * x.size(1)), 7.0, dtype=x.dtype, device=life.device)
    try:
        kept.holder.exchange.combine(kept.handle, y, out=place[:, ::2])
        if y.is_cuda:
            torch.cuda.synchronize()
            kept.handle.calls.check()
    except weft.InvalidArgument:
        return
    order = kept.how.get("order", "rank")
    same("memory with gaps", place[:, ::2], rows.sums(x, order=order, alive=kept.holder.alive()))


@step(0.2, device="cpu")
def failed_growth(life: Life) -> None:
    """A rank has no memory while its exchange has to grow; then it has, and all grow."""
    held, culprit = life.held(), life.rng.choice(life.members)
    tokens = [held.exchange.max_tokens + 20_000] * life.num_ranks
    batch = life.batch(held.hidden, held.num_experts, tokens=tokens, topk=1)
    idx, limit = batch.of(life.rank, batch.idx), resource.getrlimit(resource.RLIMIT_AS)
    if life.rank == culprit:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 3_000_000, limit[1]))
    try:
        with contextlib.suppress(weft.Error):
            held.exchange.plan(idx)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    rows = held.exchange.plan(idx).num_rows
    same("rows", rows, Rows(batch, life.rank, alive=held.alive()).num_rows)
