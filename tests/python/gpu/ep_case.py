# SPDX-License-Identifier: Apache-2.0
"""Calls of EPBuffer, for call_cases.py."""

import torch

from weft.compat.deep_ep import EPBuffer

MODES = [  # do_expand, do_cpu_sync, allow_multiple_reduction
    (False, True, True),
    (False, False, True),
    (True, True, True),
    (True, False, True),
    (True, True, False),
]


def ep(group, inputs):
    """Both layouts, one stage of sums and several, a bias that is made late; copies of experts."""
    return [*sums(group, inputs), *copies(group, inputs)]


def sums(group, inputs):
    results = []
    for do_expand, do_cpu_sync, multiple in MODES:
        sizes = (None, 64, inputs.x.size(1))
        buffer = EPBuffer(group, *sizes, allow_multiple_reduction=multiple)
        rows, _, weights, handle, _ = buffer.dispatch(
            inputs.x,
            inputs.idx,
            inputs.weights,
            num_experts=inputs.num_experts,
            do_expand=do_expand,
            do_cpu_sync=do_cpu_sync,
        )
        ends = handle.psum_num_recv_tokens_per_scaleup_rank
        if do_expand:
            ends = handle.psum_num_recv_tokens_per_expert
        used = int(ends[-1])
        bias = torch.zeros_like(inputs.x)
        event = buffer.combine(
            rows * 3,
            handle,
            weights,
            (bias, inputs.x),
            async_with_compute_stream=True,
            defer_epilogue=True,
        )
        bias += 1 / 3
        results += [rows[:used], weights[:used], *event.wait()]
        results += buffer.combine(rows * 3, handle)[:1]
    return results


def copies(group, inputs):
    """Two slots of each rank for experts of the ranks after it in its domain."""
    buffer = EPBuffer(group, 2 << 20)
    size, local = buffer.num_nvlink_ranks, inputs.num_experts // buffer.num_ranks
    rank = torch.arange(size, dtype=torch.int32)
    owners = torch.stack([(rank + 1) % size, (rank + 2) % size], dim=1)
    is_other = owners != rank[:, None]
    mapping = torch.where(is_other, owners * local + 1, -1).to(inputs.device, torch.int32)
    own = torch.arange(local * 40.0, device=inputs.device).view(local, 40) * (3 + buffer.rank_idx)
    slots = torch.zeros(2, 40, device=inputs.device)
    buffer.lb_prefetch_weights(slots, own, mapping).wait()
    grads = own.clone()
    buffer.lb_reduce_grads(slots, grads, mapping).wait()
    return [slots, grads]
