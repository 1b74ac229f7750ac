# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's module `pytorch.ep`, by Weft's exchanges instead of NCCL EP.

    ep_bootstrap(group, E, max_tokens, H, K, recv_capacity_per_rank=N)
    buffer = EpBuffer(K, max_tokens, H, El, N)                  one for each dispatch
    rows, row_weights, counts = ep_dispatch(buffer, tokens, topk_idx, topk_weights)
    tokens = ep_combine(buffer, rows, num_local_tokens=T)

`weft.compat.install("transformer_engine.pytorch.ep")` puts this module under that name, in the
Transformer Engine that is installed.
"""

import atexit
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft import Group, fused_a2a
from weft.compat.deep_ep.checks import INTEGERS, check_routing
from weft.compat.deep_ep.layout import routes_of
from weft.compat.deep_ep.runtime import Call
from weft.fused_a2a import nccl_ep

__all__ = [
    "EpBuffer",
    "ep_bootstrap",
    "ep_combine",
    "ep_dispatch",
    "ep_finalize",
    "ep_prepare",
    "get_ep_group",
    "is_ep_bootstrapped",
    "is_symm_backed",
    "release_symm_mem_pool",
    "symm_mem_alloc",
]

_ranks: nccl_ep.Ranks | None = None


def ep_bootstrap(
    ep_group: dist.ProcessGroup,
    num_experts: int,
    max_tokens_per_rank: int,
    hidden_dim: int,
    num_topk: int | None = None,
    recv_capacity_per_rank: int | None = None,
    max_num_sms: int = 0,
    zero_copy: bool = False,
    drop_on_overflow: bool = False,
    max_token_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Sets the group of later buffers, whose own sizes count. Collective, once per process until
    `ep_finalize`. max_num_sms: GPU multiprocessors of a call, 0: by a table. Megatron-Core up to
    0.19 gives no num_topk.

    Routes beyond a capacity are dropped, whatever drop_on_overflow says; zero_copy has no effect.
    Raises RuntimeError at a second call, ValueError for num_topk below 1, and for zero_copy or
    drop_on_overflow without a capacity. The other ranks raise, too; those that make no second call
    do so in their next dispatch.
    """
    global _ranks
    del num_experts, max_tokens_per_rank, hidden_dim, max_token_dtype

    def check_settings() -> None:
        if _ranks is not None:
            raise RuntimeError("ep_bootstrap: it was called before (ep_finalize comes first)")
        if num_topk is not None and num_topk < 1:
            raise ValueError(f"ep_bootstrap: num_topk = {num_topk} (expected 1 or more)")
        for name, is_given in (("zero_copy", zero_copy), ("drop_on_overflow", drop_on_overflow)):
            if is_given and recv_capacity_per_rank is None:
                raise ValueError(f"ep_bootstrap: {name} without recv_capacity_per_rank")

    if _ranks is not None:
        _ranks.told(recv_capacity_per_rank, check_settings)
    Group.of(ep_group).agreed("set-up", check_settings)
    _ranks = nccl_ep.Ranks(ep_group)
    _ranks.num_sms = max_num_sms


def is_ep_bootstrapped() -> bool:
    """Returns whether `ep_bootstrap` was called, and `ep_finalize` not since."""
    return _ranks is not None


def __getattr__(name: str) -> bool:
    """Answers _BOOTSTRAPPED, which Megatron-Core up to 0.19 reads for `is_ep_bootstrapped`."""
    if name == "_BOOTSTRAPPED":
        return is_ep_bootstrapped()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_ep_group() -> dist.ProcessGroup | None:
    """Returns the group of `ep_bootstrap`, or None."""
    return None if _ranks is None else _ranks.group


def ep_finalize() -> None:
    """Closes the exchanges; every rank calls it before the group goes, any number of times."""
    global _ranks
    if _ranks is not None:
        _ranks.exchanges.close()
        _ranks = None


atexit.register(ep_finalize)


class EpBuffer(nccl_ep.NcclEpBuffer):
    """State that a dispatch leaves for its combine and for both backwards. It holds no tensor of
    the caller.

    recv_capacity_per_rank: rows that this rank receives, whatever the routing; None ("eager"): as
    many as arrive. alignment: rows of each expert are rounded up to it, 0 or a power of two.
    tokens_per_expert int64 [El] and total_recv_tokens int64 [1] are zeros until `ep_prepare` or
    `ep_dispatch` puts others in their place; the second counts dropped rows, too, and is on the CPU
    without a capacity. device: of the zeros; None: the GPU if there is one.
    Raises RuntimeError before `ep_bootstrap`, NotImplementedError for a recipe and for rows of
    another type than bf16, ValueError for another alignment; the other ranks raise in their next
    dispatch.
    """

    handle_mem: Tensor  # uint8 [0]: Weft's handle is a plan
    zero_copy = False

    def __init__(
        self,
        top_k: int,
        max_tokens_per_rank: int,
        hidden_dim: int,
        num_local_experts: int,
        recv_capacity_per_rank: int | None = None,
        alignment: int = 0,
        payload_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
        dispatch_fwd_quant_recipe: Any = None,
        combine_bwd_quant_recipe: Any = None,
    ) -> None:
        if _ranks is None:
            raise RuntimeError("EpBuffer: there is no group (ep_bootstrap comes first)")
        ranks = _ranks

        def make() -> None:
            if dispatch_fwd_quant_recipe is not None or combine_bwd_quant_recipe is not None:
                raise NotImplementedError("EpBuffer: Weft quantises nothing here (give no recipe)")
            if payload_dtype != torch.bfloat16:
                raise NotImplementedError(f"EpBuffer: payload_dtype = {payload_dtype} (bfloat16)")
            super(EpBuffer, self).__init__(
                ranks,
                num_local_experts,
                top_k=top_k,
                max_tokens_per_rank=max_tokens_per_rank,
                recv_capacity_per_rank=recv_capacity_per_rank,
                hidden_dim=hidden_dim,
                alignment=alignment,
            )

        ranks.told(recv_capacity_per_rank, make)
        self.payload_dtype = payload_dtype
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.handle_mem = torch.empty(0, dtype=torch.uint8, device=device)
        self.tokens_per_expert = torch.zeros(num_local_experts, dtype=torch.int64, device=device)
        where = "cpu" if self.eager else device
        self.total_recv_tokens = torch.zeros(1, dtype=torch.int64, device=where)


def ep_prepare(buffer: EpBuffer, topk_idx: Tensor) -> Tensor:
    """Collective. Fills the buffer's counts for topk_idx int64 or int32 [T, K] and returns
    tokens_per_expert. A dispatch does so by itself."""
    options = nccl_ep.options_of(buffer)
    with Call("ep_prepare", buffer.ranks.exchanges, "plan", **options) as call:
        _check_index(topk_idx)
        check_routing(topk_idx)
        exchange = nccl_ep.exchange_of(call, buffer, topk_idx.device)
        routes = routes_of(topk_idx, exchange.num_experts)
        nccl_ep.keep(buffer, exchange.plan(routes, **options))
    return buffer.tokens_per_expert


def ep_dispatch(
    buffer: EpBuffer,
    tokens: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    *,
    recv_tokens: Tensor | None = None,
    recv_topk_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sends tokens to experts, collective, on the current stream. tokens bf16 [T, H], topk_idx
    int64 or int32 [T, K], -1 for none, topk_weights fp32 [T, K].

    Returns rows [P, H] by local expert, then source rank, then token, those of padding zero; their
    weights fp32 [P]; tokens_per_expert. Differentiable in tokens and weights. With a capacity P is
    that, and recv_tokens and recv_topk_weights may be given in the results' shapes; their memory
    is not used. Raises NotImplementedError for other tokens, TypeError for other weights or
    indices, ValueError for memory without a capacity, and what exchanges raise; all ranks raise.
    """
    with Call("ep_dispatch", buffer.ranks.exchanges, **nccl_ep.options_of(buffer)):
        if tokens.dtype != torch.bfloat16:
            raise NotImplementedError(f"ep_dispatch: tokens has dtype {tokens.dtype} (bfloat16)")
        if topk_weights.dtype != torch.float32:
            raise TypeError(f"ep_dispatch: topk_weights has dtype {topk_weights.dtype} (float32)")
        _check_index(topk_idx)
    memory = (recv_tokens, recv_topk_weights)
    routing = (topk_idx, topk_weights)
    rows, counts, weights = fused_a2a.nccl_ep_dispatch(buffer, tokens, *routing, *memory)
    return rows, weights, counts


def ep_combine(
    buffer: EpBuffer,
    expert_out: Tensor,
    *,
    num_local_tokens: int | None = None,
    grad_out: Tensor | None = None,
) -> Tensor:
    """Sums rows [P, H] in the dispatch's order into [T, H], unweighted. Collective, on the current
    stream. T is num_local_tokens, or max_tokens_per_rank with rows of zeros behind.
    Differentiable in expert_out. The memory of grad_out is not used."""
    return fused_a2a.nccl_ep_combine(buffer, expert_out, num_local_tokens, grad_out)


def symm_mem_alloc(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    ep_group: dist.ProcessGroup,
    device: torch.device | None = None,
    use_pool: bool = False,
) -> Tensor:
    """Returns plain memory for `recv_tokens`, `recv_topk_weights`, `grad_out`, unused by Weft."""
    del use_pool
    made = fused_a2a.alloc_ep_symm_buffer(shape, dtype, ep_group)
    return made if device is None else made.to(device)


def release_symm_mem_pool(*args: Any, **options: Any) -> None:
    """Does nothing: there is no pool."""
    del args, options


def is_symm_backed(tensor: Tensor) -> bool:
    """Returns True: any memory will do."""
    del tensor
    return True


def _check_index(topk_idx: Tensor) -> None:
    if topk_idx.dtype not in INTEGERS:
        raise TypeError(f"topk_idx has dtype {topk_idx.dtype} (int32 or int64)")
