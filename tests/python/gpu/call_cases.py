# SPDX-License-Identifier: Apache-2.0
"""Inputs of a rank, and calls of every interface on them, for the tests here."""

import contextlib
import os

import torch
import torch.distributed as dist
from balance_case import balanced, balanced_dispatcher, balanced_layer, replicas
from ep_case import ep

import weft
from weft import block_formats, fused_a2a, ops
from weft.compat import deep_ep
from weft.dispatcher import DispatcherConfig, MoEFlexTokenDispatcher
from weft.fused_a2a import rank_rows

HIDDEN, LOCAL, TOPK = 512, 4, 3
TIMEOUT = 10.0  # several calls' waits fit in what the ranks of a test have


class Inputs:
    """Inputs that are the same on every device: made on the CPU."""

    def __init__(self, rank, num_ranks, device, tokens=(37, 0, 64, 5)):
        gen = torch.Generator().manual_seed(rank)
        num_tokens = tokens[rank % len(tokens)]
        self.num_experts = LOCAL * num_ranks
        self.device = device
        x = torch.randn(num_tokens, HIDDEN, generator=gen).to(torch.bfloat16)
        scores = torch.rand(num_tokens, self.num_experts, generator=gen)
        weights, idx = scores.topk(TOPK)
        idx[torch.rand(idx.shape, generator=gen) < 0.1] = -1
        chosen = torch.zeros(num_tokens, self.num_experts + 1, dtype=torch.bool)
        chosen = chosen.scatter(1, idx.where(idx >= 0, self.num_experts), True)[:, :-1]
        self.x, self.idx, self.weights = x.to(device), idx.to(device), weights.to(device)
        self.map, self.probs = chosen.to(device), (scores * chosen).to(device)


def exchange_of(group, inputs, **more):
    return weft.Exchange(
        group,
        hidden=HIDDEN,
        num_experts=inputs.num_experts,
        device=inputs.device,
        timeout=TIMEOUT,
        **more,
    )


def core(group, inputs, layout, budget=None):
    exchange = exchange_of(group, inputs)
    pad = 1 if layout == "rank_major" else 16
    stride = 256 if layout == "expert_strided" else 0
    plan = exchange.plan(
        inputs.idx, layout=layout, pad_multiple=pad, expert_stride=stride, row_budget=budget
    )
    x, w = inputs.x.clone().requires_grad_(), inputs.weights.clone().requires_grad_()
    rows, row_weights, scales = weft.dispatch(plan, x, w, inputs.idx)
    used = int(plan.num_rows_used)
    is_row = torch.arange(plan.num_rows, device=inputs.device) < used
    if layout == "expert_strided":
        is_row = torch.arange(stride, device=inputs.device).repeat(LOCAL)
        is_row = is_row < plan.rows_per_expert.repeat_interleave(stride)
    kept = torch.where(is_row[:, None], rows, 0)
    out, _ = weft.combine(plan, kept * 3)
    torch.autograd.backward([out, row_weights], [out.detach(), row_weights.detach()])
    counts = [plan.rows_per_expert, plan.padded_rows_per_expert, plan.expert_begin, plan.overflow]
    return [kept, row_weights[is_row], scales[is_row], out, x.grad, w.grad, *counts]


def rank_major(group, inputs):
    return core(group, inputs, "rank_major")


def expert_major(group, inputs):
    return core(group, inputs, "expert_major")


def expert_strided(group, inputs):
    return core(group, inputs, "expert_strided")


def by_choice(group, inputs):
    exchange = exchange_of(group, inputs)
    x, w = inputs.x.clone().requires_grad_(), inputs.weights.clone().requires_grad_()
    plan = exchange.plan(inputs.idx, inputs.weights, order="topk")
    rows, row_weights, _ = weft.dispatch(plan, x, w)
    out, _ = weft.combine(plan, rows * 3)
    torch.autograd.backward([out, row_weights], [out.detach(), row_weights.detach()])
    made = [rows, row_weights, out, x.grad, w.grad]
    made.append(weft.combine(plan, rows.detach(), scale="plan").x)
    scales = {"scale": "source", "source_weights": inputs.weights}
    made.append(weft.combine(plan, rows.detach(), **scales).x)
    made.append(exchange.combine(plan, rows.detach(), source_idx=inputs.idx, **scales).x)
    return made


def in_one_call(group, inputs):
    exchange = exchange_of(group, inputs, max_tokens=64)
    made = []
    for _ in range(3):  # the last may be ahead of a peer that is in the one before
        plan, out = exchange.plan_and_dispatch(
            inputs.idx, inputs.x, inputs.weights, inputs.idx, row_budget=512
        )
        is_row = torch.arange(plan.num_rows, device=inputs.device) < plan.num_rows_used
        kept = torch.where(is_row[:, None], out.rows, 0)
        x, _ = exchange.combine(plan, kept * 3)
        made += [kept, out.weights[is_row], out.scales[is_row], x, plan.rows_per_expert]
    return made


def rows_open(group, inputs):
    exchange = exchange_of(group, inputs, max_tokens=64)
    made = []
    for share in (1, 1, 2, 3, 1):  # of the tokens: the memory taken ahead suits or does not
        few = slice(0, inputs.x.size(0) // share)
        x = inputs.x[few].clone().requires_grad_()
        w = inputs.weights[few].clone().requires_grad_()
        plan, out = weft.plan_and_dispatch(
            exchange, inputs.idx[few], x, w, inputs.idx[few], pad_multiple=16
        )
        sums, _ = weft.combine(plan, out.rows * 3)
        torch.autograd.backward([sums, out.weights], [sums.detach(), out.weights.detach()])
        made += [*out, sums, x.grad, w.grad, plan.rows_per_expert]
    return made


def in_fewer_bits(group, inputs):
    exchange = exchange_of(group, inputs)
    made = []
    for layout in ("expert_major", "rank_major"):
        plan = exchange.plan(inputs.idx, inputs.weights, layout=layout)
        for wire in ("fp8", "logfmt10"):
            x = inputs.x.clone().requires_grad_()
            rows = weft.dispatch(plan, x).rows
            out = weft.combine(plan, rows * 3, wire=wire).x
            out.backward(inputs.x)
            made += [out, x.grad]
            if layout == "expert_major":
                made.append(weft.combine(plan, rows.detach(), scale="plan", wire=wire).x)
    return made


def row_budget(group, inputs):
    return core(group, inputs, "expert_major", 96)


def roomy_budget(group, inputs):
    return core(group, inputs, "rank_major", 512)


def fused(name):
    def case(group, inputs):
        dispatch = getattr(fused_a2a, f"{name}dispatch")
        combine = getattr(fused_a2a, f"{name}combine")
        x, w = inputs.x.clone().requires_grad_(), inputs.weights.clone().requires_grad_()
        for async_finish in (False, True):
            rows, idx, probs, counts, handle = dispatch(
                x, inputs.idx, w, inputs.num_experts, group, async_finish, async_finish
            )
            out, _ = combine(rows * 2, group, handle, async_finish, async_finish)
        torch.autograd.backward([out, probs], [out.detach(), probs.detach()])
        return [rows, idx, probs, counts, out, x.grad, w.grad, *handle]

    return case


def by_expert(calls):
    def case(group, inputs):
        x, w = inputs.x.clone().requires_grad_(), inputs.weights.clone().requires_grad_()
        rows, probs, counts, handle = calls.dispatch_by_expert(
            x, inputs.idx, w, inputs.num_experts, group, pad_multiple=16
        )
        out = calls.combine_by_expert(rows * 2, handle)
        torch.autograd.backward([out, probs], [out.detach(), probs.detach()])
        return [rows, probs, counts, handle.local_experts, out, x.grad, w.grad]

    return case


def dispatcher(backend):
    """All phases of the flex dispatcher, whose experts scale their rows."""

    def case(group, inputs):
        config = DispatcherConfig(
            num_moe_experts=inputs.num_experts,
            moe_router_topk=TOPK,
            moe_flex_dispatcher_backend=backend,
        )
        first = LOCAL * group.rank()
        own = list(range(first, first + LOCAL))
        made = MoEFlexTokenDispatcher(LOCAL, own, config, group)
        x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
        given = made.token_dispatch(*made.dispatch_preprocess(x, inputs.map, probs))
        rows, counts, row_probs = made.dispatch_postprocess(*given)
        scaled = rows * row_probs.to(rows.dtype).unsqueeze(1)
        out = made.combine_postprocess(made.token_combine(made.combine_preprocess(scaled)))
        out.backward(out.detach())
        return [rows, counts, row_probs, out, x.grad, probs.grad]

    return case


def hybrid(group, inputs):
    x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
    rows, row_probs, _, counts, handle = fused_a2a.hybrid_ep_dispatch(
        x, inputs.map, probs, group, LOCAL, pad_multiple=16
    )
    out = fused_a2a.hybrid_ep_combine(rows * 2, handle, rows.size(0), 16)
    torch.autograd.backward([out, row_probs], [out.detach(), row_probs.detach()])
    return [rows, row_probs, counts, out, x.grad, probs.grad]


def hybrid_by_topk(group, inputs):
    most, hidden = max(1, inputs.x.size(0)), inputs.x.size(1)
    buffer = deep_ep.HybridEPBuffer(group, hidden, most, LOCAL)
    routing = {"topk_idx": inputs.idx, "topk_weights": inputs.weights}
    total = {"num_of_experts": inputs.num_experts}
    rows, probs, _, counts, handle = buffer.dispatch_with_permute(
        hidden=inputs.x, **routing, **total, pad_multiple=16
    )
    again, again_probs, *_ = buffer.dispatch_with_permute(hidden=inputs.x, **routing, handle=handle)
    out, out_probs = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
    results = [rows, probs, counts, again, again_probs, out, out_probs, handle[-1]]
    rows, probs, _, handle = buffer.dispatch(inputs.x, None, *routing.values(), *total.values())
    return [*results, rows, probs, *buffer.combine(rows, probs, handle)]


def low_latency(group, inputs):
    most = 64
    buffer = deep_ep.Buffer(group, 0, 1 << 20, low_latency_mode=True, num_qps_per_rank=LOCAL)
    results = []
    for use_fp8 in (False, True):
        got, counts, handle, _, hook = buffer.low_latency_dispatch(
            inputs.x, inputs.idx, most, inputs.num_experts, use_fp8=use_fp8, return_recv_hook=True
        )
        hook()
        rows = got[0].float() * got[1].repeat_interleave(128, -1) if use_fp8 else got
        is_row = torch.arange(rows.size(1), device=inputs.device) < counts[:, None]
        rows = torch.where(is_row[:, :, None], rows, 0).to(torch.bfloat16)
        out, _, hook = buffer.low_latency_combine(
            rows, inputs.idx, inputs.weights, handle, return_recv_hook=True
        )
        hook()
        skipped = inputs.idx.clone()
        skipped[:, 1] = -1
        less, *_ = buffer.low_latency_combine(rows, skipped, inputs.weights, handle)
        given = (rows, inputs.idx, inputs.weights, handle)
        coarse, *_ = buffer.low_latency_combine(*given, use_logfmt=True)
        results += [rows, counts, out, less, coarse]
    return results


def low_latency_formats(group, inputs):
    """Small numbers and their scales, of rows that are in use."""
    most = 64
    buffer = deep_ep.Buffer(group, 0, 1 << 20, low_latency_mode=True, num_qps_per_rank=LOCAL)
    scale = torch.full((1,), 448 * 6 / 8.0, device=inputs.device)
    results = []
    for options in (
        {"use_mxfp8": True},
        {"use_nvfp4": True},
        {"use_nvfp4": True, "x_global_scale": scale},
        {"use_nvfp4": True, "x_global_scale": scale, "use_ue8m0_for_sf": True},
    ):
        (rows, scales), counts, *_ = buffer.low_latency_dispatch(
            inputs.x, inputs.idx, most, inputs.num_experts, **options
        )
        if "use_nvfp4" in options:
            rows = rows.permute(2, 0, 1)
            tiles = scales.permute(5, 2, 4, 0, 1, 3).view(torch.uint8)
            scales = block_formats.from_tiles(tiles, rows.size(1))
        is_row = torch.arange(rows.size(1), device=inputs.device) < counts[:, None]
        results.append(counts)
        for part in (rows, scales.contiguous()):
            results.append(part.view(torch.uint8).masked_fill(~is_row.unsqueeze(2), 0))
    return results


def block_rows(group, inputs):
    exchange = exchange_of(group, inputs)
    results = []
    for layout in ("rank_major", "expert_major"):
        plan = exchange.plan(inputs.idx, layout=layout)
        for quantise in ("mxfp8", "nvfp4"):
            rows, _, scales = exchange.dispatch(plan, inputs.x, quantise=quantise)
            results += [rows.view(torch.uint8), scales.view(torch.uint8)]
    return results


def elastic(group, inputs):
    """Rows for each choice, with and without a bias, and waiting or not."""
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=64)
    results = []
    for has_cpu_sync in (True, False):
        rows, _, weights, handle, _ = buffer.dispatch(
            inputs.x,
            inputs.idx,
            inputs.weights,
            num_experts=inputs.num_experts,
            do_expand=True,
            do_cpu_sync=has_cpu_sync,
        )
        used = int(handle.psum_num_recv_tokens_per_expert[-1])
        for bias in (None, inputs.x):
            out, sums, _ = buffer.combine(rows * 3, handle, weights, bias)
            results += [rows[:used], weights[:used], out, sums]
    return results


def traced(group, inputs):
    exchange = exchange_of(group, inputs)
    name = ops.register(exchange)
    x, w = inputs.x.clone().requires_grad_(), inputs.weights.clone().requires_grad_()
    rows, row_weights, counts, ticket = ops.dispatch(x, inputs.idx, w, name)
    out = ops.combine(rows * row_weights.to(rows.dtype), ticket, x.size(0))
    out.square().sum().backward()
    return [rows, row_weights, counts, out, x.grad, w.grad]


CASES = {
    "rank_major": rank_major,
    "expert_major": expert_major,
    "expert_strided": expert_strided,
    "in_one_call": in_one_call,
    "rows_open": rows_open,
    "row_budget": row_budget,
    "roomy_budget": roomy_budget,
    "fused": fused("fused_"),
    "uccl_fused": fused("uccl_fused_"),
    "by_expert": by_expert(rank_rows.DEEPEP),
    "uccl_by_expert": by_expert(rank_rows.UCCL),
    "dispatcher_deepep": dispatcher("deepep"),
    "dispatcher_uccl": dispatcher("uccl_ep"),
    "dispatcher_hybridep": dispatcher("hybridep"),
    "hybrid": hybrid,
    "hybrid_by_topk": hybrid_by_topk,
    "low_latency": low_latency,
    "low_latency_formats": low_latency_formats,
    "block_rows": block_rows,
    "in_fewer_bits": in_fewer_bits,
    "elastic": elastic,
    "ep": ep,
    "replicas": replicas,
    "traced": traced,
}


ONE_HOST = {  # refused among GPUs of several
    "by_choice": by_choice,
    "balanced": balanced,
    "balanced_layer": balanced_layer,
    "balanced_dispatcher": balanced_dispatcher,
}


@contextlib.contextmanager
def domains_of(per_domain, num_ranks):
    """Collective. Another process group: Weft remembers what it found out about one."""
    os.environ["WEFT_RANKS_PER_DOMAIN"] = str(per_domain)
    try:
        other = dist.new_group(list(range(num_ranks)))
        assert len(weft.Group.of(other).domains) == num_ranks // per_domain
        yield other
    finally:
        del os.environ["WEFT_RANKS_PER_DOMAIN"]
