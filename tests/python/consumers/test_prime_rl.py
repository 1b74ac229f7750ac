# SPDX-License-Identifier: Apache-2.0
"""The calls of prime-rl's trainer, which no registry has: Buffer with events, HybridEPBuffer by a
map, and EPBuffer with rows by expert, which it imports as deep_ep_v2; each with its gradients."""

import pytest
import torch
import torch.distributed as dist

import weft.compat
from ranks import device_of

HIDDEN, LOCAL, TOPK, SMS = 256, 2, 2, 16


def drawn(rank, count):
    maker = torch.Generator().manual_seed(rank)
    return torch.randint(-2, 3, (count, HIDDEN), generator=maker).to(torch.bfloat16)


class Case:
    """Tokens, choices, scores and gradients for which sums are exact; experts multiply."""

    def __init__(self, rank, num_ranks, tokens):
        device, count = device_of(rank), tokens[rank]
        self.first, self.num_experts = LOCAL * rank, LOCAL * num_ranks
        self.x, self.grad = (drawn(10 * rank + i, count).to(device) for i in range(2))
        maker = torch.Generator().manual_seed(rank)
        ids = torch.rand(count, self.num_experts, generator=maker).topk(TOPK).indices.to(device)
        self.scores = torch.tensor([1.0, 0.5], device=device).repeat(count, 1)
        self.scores[::3, 1] = 0  # no choice
        self.ids = ids.masked_fill(self.scores == 0, -1)
        self.by = (ids % 3 + 1) * self.scores

    def factors(self, local):
        return ((self.first + local) % 3 + 1).float()

    def check(self, out, grad_x, grad_scores):
        by = self.by.sum(1, keepdim=True)
        assert torch.equal(out.float(), self.x.float() * by)
        assert torch.equal(grad_x.float(), self.grad.float() * by)
        dots = (self.x.float() * self.grad.float()).sum(1, keepdim=True)
        used = self.scores != 0
        want = dots * torch.where(used, self.by / self.scores, 0)
        assert torch.equal(torch.where(used, grad_scores.float(), 0), want)


def by_buffer(case, group):
    from deep_ep import Buffer
    from deep_ep.utils import EventHandle, EventOverlap

    Buffer.set_num_sms(SMS)
    sizes = [0, 0]
    for config in Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size()):
        hints = config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint
        sizes = [max(size, hint(2 * HIDDEN, group.size())) for size, hint in zip(sizes, hints)]
    buffer = Buffer(group, *sizes, num_qps_per_rank=max(24, Buffer.num_sms))
    assert buffer.group == group and [buffer.num_nvl_bytes, buffer.num_rdma_bytes] == sizes

    def later():
        event = EventOverlap(EventHandle())
        return {"previous_event": event, "async_finish": True, "allocate_on_comm_stream": True}

    names = "num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert"
    *counts, is_in_rank, _ = buffer.get_dispatch_layout(
        topk_idx=case.ids, num_experts=case.num_experts
    )
    layout = dict(zip(names, counts), is_token_in_rank=is_in_rank)
    rows, ids, scores, per_expert, handle, event = buffer.dispatch(
        x=case.x, topk_idx=case.ids, topk_weights=case.scores, **layout, **later()
    )
    event.current_stream_wait()
    assert per_expert == [int((ids == expert).sum()) for expert in range(LOCAL)]
    by = torch.where(ids >= 0, case.factors(ids), 0)
    factor = (by * scores).sum(1, keepdim=True)
    out, _, event = buffer.combine(x=(rows * factor).to(rows.dtype), handle=handle, **later())
    event.current_stream_wait()
    nothing = dict.fromkeys(["topk_idx", "topk_weights", *layout])
    grad, _, _, _, _, event = buffer.dispatch(x=case.grad, handle=handle, **nothing, **later())
    event.current_stream_wait()
    dots = (grad.float() * rows.float()).sum(1, keepdim=True) * by
    grad_x, grad_scores, event = buffer.combine(
        x=(grad * factor).to(grad.dtype), handle=handle, topk_weights=dots, **later()
    )
    event.current_stream_wait()
    return out, grad_x, grad_scores


def by_hybrid_ep(case, group):
    from deep_ep import HybridEPBuffer
    from deep_ep.hybrid_ep_buffer import indices_to_map

    most = torch.tensor([len(case.x)])
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    buffer = HybridEPBuffer(
        group=group,
        hidden_dim=HIDDEN,
        max_num_of_tokens_per_rank=int(most),
        num_local_experts=LOCAL,
        use_fp8=False,
        num_sms_dispatch_api=SMS,
        num_sms_combine_api=SMS,
        load_cached_kernels=True,
        use_shared_buffer=True,
        enable_custom_allgather=True,
    )
    assert buffer.configurer.buffer_config.num_of_experts_per_rank == LOCAL
    ids = case.ids.masked_fill(case.ids < 0, 0)  # a weight of 0 then counts for nothing
    routing_map, probs = indices_to_map(case.ids, case.scores, len(case.x), case.num_experts)
    rows, scores, _, counts, handle = buffer.dispatch_with_permute(
        hidden=case.x,
        routing_map=routing_map,
        probs=probs,
        scaling_factor=None,
        num_of_experts_per_rank=LOCAL,
        pad_multiple=None,
        num_permuted_tokens=None,
        non_blocking=False,
    )
    local = torch.arange(LOCAL, device=rows.device).repeat_interleave(counts.to(rows.device))
    by = case.factors(local).unsqueeze(1)
    factor = by * scores.reshape(-1, 1)
    out, _ = buffer.combine_with_unpermute(hidden=(rows * factor).to(rows.dtype), handle=handle)
    grad, _, _, _, _ = buffer.dispatch_with_permute(
        hidden=case.grad,
        scaling_factor=None,
        handle=handle,
        num_permuted_tokens=rows.size(0),
        pad_multiple=None,
    )
    dots = (grad.float() * rows.float()).sum(1, keepdim=True) * by
    grad_x, grad_probs = buffer.combine_with_unpermute(
        hidden=(grad * factor).to(grad.dtype), probs=dots.reshape(scores.shape), handle=handle
    )
    return out, grad_x, grad_probs.gather(1, ids)


def by_ep_buffer(case, group):
    from deep_ep import EPBuffer

    sizes = {"num_max_tokens_per_rank": 64, "hidden": HIDDEN, "num_topk": TOPK}
    buffer = EPBuffer(group, **sizes, explicitly_destroy=True)
    assert buffer.group == group and buffer.num_max_tokens_per_rank == 64
    assert buffer.num_ranks == group.size()
    by_expert = {"num_sms": SMS, "do_expand": True, "do_zero_padding": True}
    rows, _, scores, handle, _ = buffer.dispatch(
        case.x,
        topk_idx=case.ids,
        topk_weights=case.scores,
        num_experts=case.num_experts,
        expert_alignment=8,
        **by_expert,
    )
    counts = torch.tensor(handle.num_recv_tokens_per_expert_list, device=rows.device)
    local = torch.repeat_interleave(counts, output_size=rows.size(0))
    place = torch.arange(rows.size(0), device=rows.device) - (counts.cumsum(0) - counts)[local]
    scores = scores.masked_fill(place >= handle.num_unaligned_recv_tokens_per_expert[local], 0)
    by = case.factors(local).unsqueeze(1)
    factor = by * scores.unsqueeze(1)
    out, _, _ = buffer.combine((rows * factor).to(rows.dtype), handle)
    assert handle.num_sms == SMS
    grad, _, _, _, _ = buffer.dispatch(case.grad, handle=handle, **by_expert)
    dots = (grad.float() * rows.float()).sum(1, keepdim=True) * by
    grad_x, grad_scores, _ = buffer.combine(
        (grad * factor).to(grad.dtype), handle, topk_weights=dots.squeeze(1)
    )
    buffer.destroy()
    return out, grad_x, grad_scores


def calls(rank, num_ranks, group, kind, tokens):
    weft.compat.install("deep_ep", force=True)
    try:
        case = Case(rank, num_ranks, tokens)
        case.check(*globals()[kind](case, group))
    finally:
        weft.compat.uninstall("deep_ep")
    dist.barrier(group)


@pytest.mark.parametrize("tokens", [(16, 5), (7, 0)], ids=str)
@pytest.mark.parametrize("kind", ["by_buffer", "by_hybrid_ep", "by_ep_buffer"])
def test_calls_of_its_dispatchers(ranks, kind, tokens):
    ranks(calls, 2, kind, tokens)
