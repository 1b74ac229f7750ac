# SPDX-License-Identifier: Apache-2.0
"""State of an exchange: its ranks, what its calls waited for, the memory it holds. exchange.py has
its calls."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from weft import _core
from weft.errors import Error, InvalidArgument
from weft.outputs import Plan


class CallReport(NamedTuple):
    """Ranks that take part in an exchange: the same on all that are left when a call is over."""

    epoch: int  # how often the ranks that take part have changed
    alive: list[int]  # ascending
    lost: list[int]  # by the last call, ascending
    # Experts that no rank alive has, ascending: lost ranks' experts without a replica in the last
    # plan's `Placement`.
    lost_experts: list[int]
    # GPUs: so many of this rank's last calls, replays of graphs included, have to be made again.
    void_calls: int = 0
    # GPUs: by how many ended calls the furthest rank was ahead. A rank that repeats no calls leaves
    # out as many.
    calls_behind: int = 0
    # GPUs, on_peer_loss="repeat": what was cut short has been made again, and plans hold.
    is_repeated: bool = False


OnLoss = Callable[[CallReport], None]


class ExchangeState:
    """The part of `Exchange` that moves no tokens: local but for `readmit` and `grow`."""

    device: torch.device
    num_ranks: int
    num_local_experts: int
    max_tokens: int
    max_topk: int
    core: _core.Exchange
    _core: _core.Exchange | None
    _on_loss: OnLoss | None
    _stream: Callable[[], int]

    def report(self) -> CallReport:
        """Returns what the last call has found; with on_peer_loss="fail" all ranks are alive.
        `plan_and_dispatch` is two calls on a CPU."""
        return CallReport(*self.core.report())

    def alive(self) -> list[int]:
        """The ranks that take part, ascending."""
        return self.report().alive

    def mask(self, ranks: Iterable[int]) -> None:
        """Ends the next call, of all ranks, without `ranks`, as if they had died; the living among
        them get a PeerError. Raises InvalidArgument for this rank and for what is no rank,
        Unsupported without on_peer_loss="shrink"."""
        self.core.mask(_numbers("mask", ranks, self.num_ranks))

    def invitation(self) -> str:
        """Returns the text by which a new process takes the place of a lost rank: `Group.rejoin`.
        Raises Unsupported without on_peer_loss="shrink"; so do `readmit` and `grow`."""
        return self.core.invitation()

    def readmit(self, ranks: Iterable[int]) -> None:
        """Takes lost ranks in again, whose new processes make their exchange meanwhile; all ranks
        that are left call it between the same two calls. Plans from before are refused then. Raises
        InvalidArgument for ranks that are not lost, TimeoutError with those that have not come
        within the timeout, PeerError if they are lost again: the same on all ranks that are left,
        and the exchange can be used on. On GPUs replays must have ended; raises RanksLost where a
        rank was lost before all had called this, TimeoutError if the process that had the place
        lives on. Graphs captured before go on with WEFT_GPU_TRANSPORT=vmm; else they do nothing
        when they are replayed, and `check` raises InvalidArgument.
        """
        self.core.readmit(_numbers("readmit", ranks, self.num_ranks))
        self._take_sizes(self.core)

    def grow(self, max_tokens: int, max_topk: int) -> bool:
        """Makes room for later calls, with on_peer_loss="shrink"; all ranks that are left call it
        between the same two calls. A rank may then have as many tokens, and a token as many
        choices, as any of them asks for here. Plans from before go on. A call that needs more room
        makes it by itself.

        Returns False if there was room. Raises on every rank InvalidArgument for more than can be,
        Unsupported without on_peer_loss="shrink", and on GPUs.
        """
        has_grown = self.core.grow(max_tokens, max_topk)
        self._take_sizes(self.core)
        return has_grown

    def _take_sizes(self, core: _core.Exchange) -> None:
        self.max_tokens, self.max_topk = core.max_tokens, core.max_topk

    def renormalisation(
        self, topk_idx: Tensor, weights: Tensor, plan: Plan | None = None
    ) -> Tensor:
        """Returns factors [T, 1] for the tokens of `combine`: the sum of a token's weights over
        that of its routes to ranks alive; 1 where nothing is left. topk_idx [T, K], negative for no
        route; weights [T, K], differentiable. plan: made of topk_idx; needed with replicas, as it
        says to which ranks the routes went."""
        if plan is None:
            owners = topk_idx.div(self.num_local_experts, rounding_mode="floor")
        else:
            of = {"dtype": topk_idx.dtype, "device": topk_idx.device}
            owners = torch.tensor(plan.core.route_ranks, **of).view_as(topk_idx)
        alive = torch.tensor(self.alive(), dtype=owners.dtype, device=owners.device)
        routed = weights.masked_fill(topk_idx < 0, 0.0)
        kept = routed.masked_fill(~torch.isin(owners, alive), 0.0)
        left = kept.sum(1, keepdim=True)
        return torch.where(left == 0, 1.0, routed.sum(1, keepdim=True) / left.where(left != 0, 1.0))

    def _loss_teller(self) -> Callable[..., None]:
        """Returns the function that the core calls, which must not keep the exchange alive: no
        collector would see the cycle."""
        kept = weakref.ref(self)

        def tell(*report: int | list[int]) -> None:
            there = kept()
            if there is not None and there._on_loss is not None:
                there._on_loss(CallReport(*report))

        return tell

    def stats(self) -> dict:
        """Returns calls so far, the seconds this rank waited for each peer, and (CPU) the bytes of
        rows put to other domains: those that crossed, and what a row per rank there would take.
        """
        return self.core.stats()

    @contextlib.contextmanager
    def waits_added(self, sums: Tensor, plan: Plan | None = None) -> Iterator[None]:
        """Adds to sums, int64 [R] on the exchange's device, the microseconds that calls within have
        waited for each rank: calls by `plan`, or by plans made within. On a GPU in the order of the
        current stream. Of CPU workers or GPU blocks that wait at the same time each counts.
        """
        core, stream = self.core if plan is None else plan.calls, self._stream()
        own = sums if sums.is_contiguous() else sums.new_zeros(sums.shape)
        core.add_waits(own, -1, stream)
        try:
            yield
        finally:
            with contextlib.suppress(Error):  # of an exchange that can no longer be used
                core.add_waits(own, 1, stream)
        if own is not sums:
            sums += own

    @property
    def is_in_graphs(self) -> bool:
        """True if a CUDA graph holds calls that this exchange has made since it last grew."""
        return self._core is not None and self._core.stats()["num_captured"] > 0

    def footprint(self) -> dict:
        """Returns bytes held: control, staging, buffers in use, pooled for later ones."""
        return self.core.footprint()

    def release_pooled(self) -> None:
        """Frees pooled memory. On a GPU only while no rank runs or begins a call."""
        self.core.release_pooled()


def _numbers(verb: str, ranks: Iterable[int], num_ranks: int) -> list[int]:
    try:
        found = [operator.index(rank) for rank in ranks]
    except TypeError as error:
        raise InvalidArgument(f"{verb}: ranks = {ranks!r} (expected numbers)") from error
    for rank in found:
        if not 0 <= rank < num_ranks:
            raise InvalidArgument(f"{verb}: rank {rank} is out of range ({num_ranks} ranks)")
    return found
