# SPDX-License-Identifier: Apache-2.0
"""Tokens to rows grouped by expert, on one rank, and back.

All row movement of this package is gathering rows by index and its adjoint, summing rows by index,
in a fixed order: permute is the first, unpermute the second, and each is the backward of the other.
Neither keeps the rows. An index equal to the number of rows names no row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import expect


class Permuted(NamedTuple):
    """Result of `permute`. P: rows."""

    rows: Tensor  # [P, H]
    probs: Tensor | None  # [P], the dtype of the probabilities that went in
    row_token: Tensor  # int64 [P]: the token of each row; T (no token) for a padding row
    # int64 [E], rows of padding in front of each expert's block, if rows were padded to
    # `align_size`; else int64 [P], the order in which unpermute adds rows, if that was asked for.
    pad_offsets: Tensor | None
    tokens_per_expert: Tensor | None  # [E] padded counts, where rows were padded


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    tokens_per_expert: Tensor | None = None,
    align_size: int = 0,
    return_batch_invariant_inverse_map: bool = False,
) -> Permuted:
    """Makes a row per set entry of the map: by expert, and inside an expert by token.

    tokens [T, H]; routing_map bool [T, E]; probs [T, E] of any float dtype. Differentiable in
    tokens and probs.

    num_out_tokens: the number of set entries, which spares a wait for the GPU; required unless
    `fused`. A smaller number drops the last rows.
    fused changes no number. With probs, tokens_per_expert (int64 [E], the map's column sums) and
    align_size > 0 it also pads each expert's block to a multiple of align_size with zero rows.
    drop_and_pad: every expert gets exactly num_out_tokens / E rows: its first ones, then zero rows
    of probability zero. The reference fills up with tokens that were not routed to the expert,
    and breaks when there are fewer tokens than rows; a zero row computes nothing and always exists.

    Raises AssertionError without num_out_tokens where it is required.
    """
    num_tokens, num_experts = routing_map.shape
    pad_offsets = padded_counts = None
    if drop_and_pad:
        expect(num_out_tokens is not None, "num_out_tokens is required for drop and pad")
        token, expert = _first_of_each_expert(routing_map, num_out_tokens // num_experts)
    else:
        if num_out_tokens is None:
            expect(fused, "num_out_tokens is required for the argsort-based permute")
            num_out_tokens = int(routing_map.sum())
        token, expert = _set_entries(routing_map, num_out_tokens)
        if fused and probs is not None and tokens_per_expert is not None and align_size > 0:
            token, expert, pad_offsets, padded_counts = _with_padding(
                token, expert, num_tokens, tokens_per_expert, align_size
            )
    has_absent = drop_and_pad or pad_offsets is not None
    rows = gather_rows(tokens, token, has_absent)
    row_probs = None if probs is None else _pick(probs, token, expert, has_absent)
    extra = pad_offsets
    if extra is None and return_batch_invariant_inverse_map:
        extra = token.argsort(stable=True)
    return Permuted(rows, row_probs, token, extra, padded_counts)


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    pad_offsets: Tensor | None = None,
    batch_invariant_inverse_map: Tensor | None = None,
) -> Tensor:
    """Sums each token's rows, back into tokens.

    permuted_tokens [P, H] and the row_token that `permute` gave; restore_shape (T, H).
    probs [T, E] with the routing_map weigh the rows first. Returns [T, H] in the rows' dtype;
    differentiable in permuted_tokens and probs. A token's rows are added by ascending expert in
    fp32 and rounded once; the reference adds in the rows' dtype, in any order.
    `fused` and `batch_invariant_inverse_map` are accepted and change nothing.

    Raises AssertionError for probs without routing_map.
    """
    del fused, batch_invariant_inverse_map
    num_tokens = restore_shape[0]
    rows = permuted_tokens
    has_absent = drop_and_pad or pad_offsets is not None
    if probs is not None:
        expect(routing_map is not None, "Mask must be provided to permute the probs.")
        expert = _expert_of_rows(sorted_indices, routing_map, drop_and_pad, pad_offsets)
        rows = rows * _pick(probs, sorted_indices, expert, has_absent).unsqueeze(1)
    out = sum_rows(rows, sorted_indices, num_tokens, has_absent)
    return out.to(permuted_tokens.dtype)


def sort_chunks_by_idxs(
    input: Tensor,
    split_sizes: Tensor | Sequence[int],
    sorted_idxs: Tensor | Sequence[int],
    probs: Tensor | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Cuts rows into chunks and returns them in another order: chunk sorted_idxs[0] first.

    input [P, ...]; split_sizes sum to P; probs [P] moves alike. Differentiable in both.
    `fused` changes nothing. Sizes on a GPU cost a wait.
    """
    del fused
    sizes, order = _numbers(split_sizes), _numbers(sorted_idxs)

    def sort(rows: Tensor) -> Tensor:
        chunks = rows.split(sizes)
        return torch.cat([chunks[i] for i in order]) if order else rows

    return sort(input), None if probs is None else sort(probs)


def _numbers(values: Tensor | Sequence[int]) -> list[int]:
    return values.tolist() if isinstance(values, Tensor) else list(values)


def _set_entries(routing_map: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns token and expert of the first `count` set entries, by expert."""
    num_tokens = max(routing_map.shape[0], 1)
    # A stable sort puts the set entries first and keeps their order; nonzero() would wait.
    by_expert = routing_map.T.reshape(-1).to(torch.int8)
    entry = by_expert.argsort(descending=True, stable=True)[:count]
    return entry % num_tokens, entry // num_tokens


def _first_of_each_expert(routing_map: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Returns token (T: none) and expert of `capacity` rows of each expert."""
    num_tokens, num_experts = routing_map.shape
    is_set, token = routing_map.T.to(torch.int8).sort(dim=1, descending=True, stable=True)
    token = token.masked_fill(is_set == 0, num_tokens)[:, :capacity]
    missing = capacity - token.shape[1]
    token = torch.nn.functional.pad(token, (0, missing), value=num_tokens)
    expert = torch.arange(num_experts, device=token.device).repeat_interleave(
        capacity, output_size=num_experts * capacity
    )
    return token.reshape(-1), expert


def _with_padding(
    token: Tensor, expert: Tensor, num_tokens: int, counts: Tensor, align: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Spreads rows so that each expert's block is a multiple of `align` long."""
    padded = -(-counts // align) * align
    num_rows = int(padded.sum())
    added = (padded - counts).to(token.device)
    pad_offsets = added.cumsum(0) - added
    row = torch.arange(token.shape[0], device=token.device) + pad_offsets[expert]
    spread_token = token.new_full((num_rows,), num_tokens).index_copy(0, row, token)
    spread_expert = expert.new_zeros((num_rows,)).index_copy(0, row, expert)
    return spread_token, spread_expert, pad_offsets, padded


def _expert_of_rows(
    token: Tensor, routing_map: Tensor, drop_and_pad: bool, pad_offsets: Tensor | None
) -> Tensor:
    """Returns the expert of each row of `permute`; any for a padding row."""
    num_experts = routing_map.shape[1]
    row = torch.arange(token.shape[0], device=token.device)
    if drop_and_pad:
        return row // max(token.shape[0] // num_experts, 1)
    counts = routing_map.sum(0)
    begin = counts.cumsum(0) - counts
    if pad_offsets is not None:
        begin = begin + pad_offsets
    return torch.searchsorted(begin, row, right=True) - 1


def _pick(probs: Tensor, token: Tensor, expert: Tensor, has_absent: bool) -> Tensor:
    """Gets `probs[token, expert]`, 0 without a token."""
    entry = token * probs.shape[1] + expert  # behind the last entry where there is no token
    return _gather(probs.reshape(-1, 1), entry, has_absent).squeeze(1)


def gather_rows(rows: Tensor, index: Tensor, has_absent: bool = False) -> Tensor:
    """Gathers `rows[index]`: [T, H], int64 [P] -> [P, H]; differentiable.

    has_absent: `index` may hold T, which gives a zero row. Otherwise no index is read, so that
    nothing waits for a GPU.
    """
    return _MoveRows.apply(rows, index, None, has_absent)


def sum_rows(rows: Tensor, index: Tensor, num_rows: int, has_absent: bool = False) -> Tensor:
    """Sums rows by index, [P, H], int64 [P] -> [num_rows, H]: row t has those of index t.

    Rows are added in ascending order in fp32 (fp64 for fp64) and rounded once, so that the result
    is the same bit for bit on every run; a row without an index is zero. Rows with index `num_rows`
    are dropped. Differentiable.
    """
    return _MoveRows.apply(rows, index, num_rows, has_absent)


class _MoveRows(torch.autograd.Function):
    """Sums rows into `num_rows`, or gathers them if that is None: each is the other's backward."""

    @staticmethod
    def forward(ctx, rows, index, num_rows, has_absent):  # noqa: ANN001, ANN205
        ctx.save_for_backward(index)
        ctx.num_back, ctx.has_absent = rows.shape[0] if num_rows is None else None, has_absent
        if num_rows is None:
            return _gather(rows, index, has_absent)
        return _sum(rows, index, num_rows)

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        (index,) = ctx.saved_tensors
        return _MoveRows.apply(grad, index, ctx.num_back, ctx.has_absent), None, None, None


def _gather(rows: Tensor, index: Tensor, has_absent: bool) -> Tensor:
    if not has_absent:
        return rows.index_select(0, index)
    num_rows = rows.shape[0]
    if num_rows == 0:
        return rows.new_zeros((index.shape[0], *rows.shape[1:]))
    gathered = rows.index_select(0, index.clamp(max=num_rows - 1))
    return gathered.masked_fill_((index >= num_rows).unsqueeze(1), 0)


def _sum(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    if num_rows == 0 or rows.shape[0] == 0:
        return rows.new_zeros((num_rows, *rows.shape[1:]))
    order = index.argsort(stable=True)
    # One bag for each output row and a last one, thrown away, for the rows that go nowhere.
    # embedding_bag adds a bag's rows one after the other in fp32, without atomics.
    bags = torch.arange(num_rows + 1, device=index.device)
    begin = torch.searchsorted(index[order], bags)
    # On a CPU it rounds bf16 sums that lie halfway away from zero, not to even as everything else.
    addends = rows.float() if rows.dtype == torch.bfloat16 and not rows.is_cuda else rows
    return F.embedding_bag(order, addends, begin, mode="sum")[:num_rows].to(rows.dtype)
