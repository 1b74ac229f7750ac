# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's functions of NCCL EP, on Weft's exchanges: neither NCCL EP nor Transformer Engine
is needed. Rows lie by local expert; the caller may fix their number beforehand.

    ensure_nccl_ep_bootstrapped(group, E, max_tokens, capacity, H, K)
    buffer = new_nccl_ep_buffer(K, max_tokens, capacity, H, El)     one for each dispatch
    rows, counts, row_probs = nccl_ep_dispatch(buffer, tokens, topk_idx, topk_weights)
    tokens = nccl_ep_combine(buffer, rows, num_local_tokens=T)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft import Exchange, Group, Plan
from weft import fused_a2a as state
from weft.compat.deep_ep.checks import FLOATS, check, check_routing, check_tensor
from weft.compat.deep_ep.layout import routes_of
from weft.compat.deep_ep.runtime import MIN_TOKENS, MIN_TOPK, Call, ExchangePool

from .buffers import _cached, parked, take_all


class Ranks:
    """Exchanges and settings of a group that is set up."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.exchanges = ExchangePool(Group.of(group))
        self.num_sms = 0

    def told(self, capacity: int | None, make: Callable[[], Any]) -> Any:
        """Returns make(), which is local. A failure fails the other ranks' next dispatch, with the
        reason. capacity: rows that this rank wants to receive."""
        try:
            return make()
        except Exception:
            with Call("set_up", self.exchanges, row_budget=capacity, overflow="drop"):
                raise


class NcclEpBuffer:
    """State that a dispatch leaves for its combine, without tensors of the caller."""

    def __init__(self, ranks: Ranks, num_local_experts: int, **sizes: int | None) -> None:
        """sizes: see `new_nccl_ep_buffer`. Raises ValueError for a wrong alignment."""
        alignment = sizes["alignment"]
        if alignment < 0 or alignment & (alignment - 1):
            raise ValueError(f"alignment = {alignment} (expected a power of two)")
        self.ranks = ranks
        self.num_sms = ranks.num_sms
        self.num_local_experts = num_local_experts
        self.top_k = sizes["top_k"]
        self.max_tokens_per_rank = sizes["max_tokens_per_rank"]
        self.recv_capacity_per_rank = sizes["recv_capacity_per_rank"]
        self.hidden_dim = sizes["hidden_dim"]
        self.alignment = alignment
        self.plan: Plan | None = None
        self.tokens_per_expert: Tensor | None = None  # int64 [El]: rows, padding included
        # int64 [1]: rows that hold every route, dropped ones too; on the CPU without a capacity.
        self.total_recv_tokens: Tensor | None = None

    @property
    def eager(self) -> bool:
        """True if there are as many rows as arrive."""
        return self.recv_capacity_per_rank is None


def ensure_nccl_ep_bootstrapped(
    ep_group: dist.ProcessGroup,
    num_experts: int,
    max_tokens_per_rank: int,
    recv_capacity_per_rank: int | None,
    hidden_dim: int,
    num_topk: int | None = None,
    num_sms: int = 0,
    zero_copy: bool = False,
) -> None:
    """Sets the group of later buffers. Collective at the first call for a group.

    num_topk: None from versions of Megatron-LM that do not say it, such as 0.19.
    num_sms: GPU multiprocessors of each call, 0: by Weft's table. The sizes are unused, since
    buffers have their own.
    Raises ValueError for `num_topk` below 1 and for `zero_copy` without a capacity. All ranks raise
    then, in the first call for a group or else in their next dispatch.
    """
    del num_experts, max_tokens_per_rank, hidden_dim
    name = "ensure_nccl_ep_bootstrapped"

    def check_settings() -> None:
        if num_topk is not None and num_topk < 1:
            raise ValueError(f"{name}: num_topk = {num_topk} (expected 1 or more)")
        if zero_copy and recv_capacity_per_rank is None:
            raise ValueError(f"{name}: zero_copy needs recv_capacity_per_rank")

    def make() -> Ranks:
        Group.of(ep_group).agreed("set-up", check_settings)
        return Ranks(ep_group)

    ranks = _cached("_nccl_ep_ranks", ep_group, make)
    ranks.told(recv_capacity_per_rank, check_settings)
    ranks.num_sms = num_sms


def is_nccl_ep_bootstrapped() -> bool:
    """Returns whether any group is set up."""
    return state._nccl_ep_ranks is not None or bool(parked.get("_nccl_ep_ranks"))


def nccl_ep_finalize() -> None:
    """Closes the exchanges of all groups; to be called on every rank before the groups go."""
    for ranks in take_all("_nccl_ep_ranks"):
        ranks.exchanges.close()


def alloc_ep_symm_buffer(
    shape: tuple[int, ...], dtype: torch.dtype, ep_group: dist.ProcessGroup
) -> Tensor:
    """Returns plain memory for `recv_tokens`, `recv_topk_weights`, `grad_out`, unused by Weft."""
    del ep_group
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.empty(shape, dtype=dtype, device=device)


def new_nccl_ep_buffer(
    top_k: int,
    max_tokens_per_rank: int,
    recv_capacity_per_rank: int | None,
    hidden_dim: int,
    num_local_experts: int,
    alignment: int = 0,
    dispatch_fwd_quant_recipe: Any = None,
    combine_bwd_quant_recipe: Any = None,
) -> NcclEpBuffer:
    """Makes a buffer for a dispatch, its combine and their backward, on the group set up last.

    recv_capacity_per_rank: rows that this rank receives, whatever the routing; what does not fit is
    dropped, and nothing waits for a GPU. None: as many as arrive. alignment: rows of each expert
    are rounded up to it, 0 or a power of two. Only the capacity may differ between ranks, which all
    have one or none.
    Raises RuntimeError with no group set up and for a recipe, ValueError for another alignment; of
    the last two the other ranks hear in their next dispatch.
    """
    if state._nccl_ep_ranks is None:
        raise RuntimeError("new_nccl_ep_buffer: call ensure_nccl_ep_bootstrapped first")
    ranks = state._nccl_ep_ranks

    def make() -> NcclEpBuffer:
        if dispatch_fwd_quant_recipe is not None or combine_bwd_quant_recipe is not None:
            raise RuntimeError("new_nccl_ep_buffer: Weft quantises nothing here (give no recipe)")
        return NcclEpBuffer(
            ranks,
            num_local_experts,
            top_k=top_k,
            max_tokens_per_rank=max_tokens_per_rank,
            recv_capacity_per_rank=recv_capacity_per_rank,
            hidden_dim=hidden_dim,
            alignment=alignment,
        )

    return ranks.told(recv_capacity_per_rank, make)


def nccl_ep_dispatch(
    buffer: NcclEpBuffer,
    tokens: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    recv_tokens: Tensor | None = None,
    recv_topk_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sends tokens bf16, fp16 or fp32 [T, H] by topk_idx int64 or int32 [T, K], -1 for none, with
    topk_weights fp32 [T, K]. Collective, on the current stream.

    Returns rows [P, H], by local expert, then source rank, then token, those of padding zero; rows
    of each expert, padding included, int64 [El] beside the tokens; the rows' weights fp32 [P].
    Differentiable in `tokens` and `topk_weights`; no input is kept for backward. With a capacity,
    P, rows past the last expert's are undefined, and dropped ones come back as zeros.
    recv_tokens and recv_topk_weights, which need a capacity, have the shapes of the results; their
    memory is not used.
    Raises ValueError for them, and what exchanges raise: InvalidArgument, TimeoutError, PeerError.
    """
    pool, capacity = buffer.ranks.exchanges, buffer.recv_capacity_per_rank
    options = options_of(buffer)
    with Call("nccl_ep_dispatch", pool, **options) as call:
        given = {"recv_tokens": recv_tokens, "recv_topk_weights": recv_topk_weights}
        for name, memory in given.items():
            check(memory is None or not buffer.eager, f"{name} without recv_capacity_per_rank")
            is_long_enough = memory is None or memory.size(0) == capacity
            check(is_long_enough, f"{name} does not have {capacity} rows")
        check_tensor("tokens", tokens, FLOATS, ["T", buffer.hidden_dim])
        check_routing(topk_idx, topk_weights, tokens.size(0))
        most = buffer.max_tokens_per_rank
        check(
            buffer.eager or tokens.size(0) <= most,
            f"{tokens.size(0)} tokens (max_tokens_per_rank = {most})",
        )
        exchange = exchange_of(call, buffer, tokens.device)
        num_sms = buffer.num_sms if tokens.is_cuda else 0
        routes = routes_of(topk_idx, exchange.num_experts)
        plan, out = weft.plan_and_dispatch(
            exchange, routes, tokens, topk_weights, num_sms=num_sms, **options
        )
    keep(buffer, plan)
    return out.rows, buffer.tokens_per_expert, out.weights.view(-1)


def options_of(buffer: NcclEpBuffer) -> dict[str, Any]:
    """Returns the options of the plans of the buffer's dispatches."""
    return {
        "pad_multiple": max(buffer.alignment, 1),
        "row_budget": buffer.recv_capacity_per_rank,
        "overflow": "drop",
    }


def exchange_of(call: Call, buffer: NcclEpBuffer, device: torch.device) -> Exchange:
    """Returns the exchange of the call's plans. Collective, within `call`."""
    num_experts = buffer.num_local_experts * buffer.ranks.exchanges.group.num_ranks
    # Without a capacity the number of tokens is told, and exchanges grow by themselves.
    room = MIN_TOKENS if buffer.eager else buffer.max_tokens_per_rank
    key = (buffer.hidden_dim, num_experts, device)
    return call.plans(key, room, max(MIN_TOPK, buffer.top_k), **options_of(buffer))


def keep(buffer: NcclEpBuffer, plan: Plan) -> None:
    """Keeps the plan and its counts."""
    buffer.plan = plan
    buffer.tokens_per_expert = plan.padded_rows_per_expert.clone()
    if buffer.eager:
        buffer.total_recv_tokens = torch.tensor([plan.num_rows], device="cpu")
    else:
        buffer.total_recv_tokens = plan.num_rows_required.clone()


def nccl_ep_combine(
    buffer: NcclEpBuffer,
    expert_out: Tensor,
    num_local_tokens: int | None = None,
    grad_out: Tensor | None = None,
) -> Tensor:
    """Sums rows [P, H] in the dispatch's order into tokens [T, H], unweighted: a rank's in fp32,
    rounded, then over the ranks. Collective, on the current stream.

    num_local_tokens: T; without it there are rows of zeros up to max_tokens_per_rank.
    Differentiable in `expert_out`, which is not kept. The memory of grad_out is not used.
    Raises ValueError for fewer rows than the dispatch had tokens, and before a dispatch; the other
    ranks raise, too.
    """
    del grad_out
    wanted = buffer.max_tokens_per_rank if num_local_tokens is None else num_local_tokens
    with Call("nccl_ep_combine", buffer.ranks.exchanges, "combine") as call:
        check(buffer.plan is not None, "the buffer has had no dispatch")
        plan = call.by(buffer.plan)
        missing = wanted - plan.num_tokens
        check(missing >= 0, f"num_local_tokens = {wanted} of {plan.num_tokens} tokens")
        num_sms = buffer.num_sms if expert_out.is_cuda else 0
        tokens = weft.combine(plan, expert_out, num_sms=num_sms).x
    return torch.nn.functional.pad(tokens, (0, 0, 0, missing)) if missing else tokens
