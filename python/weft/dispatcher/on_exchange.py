# SPDX-License-Identifier: Apache-2.0
"""The flex dispatcher straight on an exchange, for what buffers of other libraries have no
arguments for: replicas of popular experts, sums in the order of choices. flex.py makes it."""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft import autograd
from weft.balance import Balance
from weft.compat.deep_ep.runtime import MIN_TOKENS, ExchangePool, timeout_of
from weft.exchange import Exchange
from weft.group import Group
from weft.outputs import Plan
from weft.placement import Balancing

from .by_expert import ByExpertManager
from .manager import as_float32

_Kinds = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # of an expert's tensors: shape, dtype


class _Shared:
    """Exchanges and balances of all layers of a process group. Making one is collective: a rank
    that makes one alone makes the others' call on the last one fail."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._exchanges = ExchangePool(Group.of(group), timeout_of())
        self._balances: dict[tuple[int, int, torch.device, _Kinds], Balance] = {}
        self._last: Balance | None = None

    def exchange(self, hidden: Tensor, num_experts: int, topk: int, **options: Any) -> Exchange:
        """options: of the plan and dispatch to come."""
        key = (hidden.size(1), num_experts, hidden.device)
        exchange = self._exchanges.get(key, MIN_TOKENS, topk, "plan_and_dispatch", options)
        self._exchanges.last = exchange
        return exchange

    def balance(self, exchange: Exchange, replicas: int, kinds: _Kinds) -> Balance:
        key = (replicas, exchange.num_experts, exchange.device, kinds)
        if key not in self._balances:
            if self._last is not None:
                self._last._announce(exchange)
            shapes, dtypes = zip(*kinds)
            self._balances[key] = Balance(
                exchange, replicas=replicas, shapes=shapes, dtypes=dtypes, timeout=timeout_of()
            )
        self._last = self._balances[key]
        return self._last


_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, _Shared] = weakref.WeakKeyDictionary()


class _ExchangeManager(ByExpertManager):
    """Any number of tokens on any rank, zero included. Experts are this rank's own, then its places
    for replicas. A row budget: see `ByExpertManager`."""

    drop_and_pad = False

    def __init__(
        self,
        group: Any,
        num_local_experts: int,
        router_topk: int,
        num_experts: int,
        config: Any,
    ) -> None:
        """router_topk and num_experts count every TP rank. Raises ValueError for drop-and-pad."""
        c = self._take(group, num_local_experts, router_topk, num_experts, config)
        if c.moe_pad_expert_input_to_capacity:
            raise ValueError("moe_balance_replicas, moe_combine_order: no drop-and-pad with them")
        self.replicas: int = c.moe_balance_replicas
        balancing = Balancing(self.replicas, block_rows=c.moe_balance_block_rows)
        self._options = {
            "pad_multiple": self.align_size or 1,
            "order": c.moe_combine_order,
            "balance": balancing if self.replicas else 0,
        }
        self.routing_map: Tensor | None = None
        self.token_indices: Tensor | None = None

    @property
    def plan(self) -> Plan:
        """The last dispatch's plan, until its combine."""
        return self.handle

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        self.routing_map, self.token_indices = routing_map.flatten(1), None
        self.token_probs = probs.flatten(1)
        self._most = self._most_tokens(self.routing_map)

    def setup_metadata_from_indices(self, token_indices: Tensor, token_probs: Tensor) -> None:
        self.routing_map, self.token_indices = None, token_indices
        self.token_probs = token_probs
        self._most = self._most_tokens(token_indices)

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """Collective, on the current stream: the two flags change nothing."""
        del async_finish, allocate_on_comm_stream
        probs = as_float32(self.token_probs, None)
        self.token_probs = probs.detach()  # or the router's graph would live until the next pass
        budget = self._row_budget()
        sizes = (self.num_experts, self.router_topk)
        exchange = self._of_group().exchange(
            hidden_states, *sizes, row_budget=budget, **self._options
        )
        self.handle, out = autograd.plan_and_dispatch(
            exchange,
            self.token_indices,
            hidden_states,
            probs,
            routing_map=self.routing_map,
            row_budget=budget,
            **self._options,
        )
        if budget is not None:
            self._note_overflow(self.plan.overflow != 0)
        self.tokens_per_expert = self.plan.padded_rows_per_expert
        self.dispatched_probs = out.weights.squeeze(1)
        return out.rows

    def combine(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """Collective, on the current stream: the two flags change nothing."""
        del async_finish, allocate_on_comm_stream
        tokens = autograd.combine(self.plan, hidden_states).x
        self.handle = None
        self.dispatched_probs = self.dispatched_probs.detach()
        return tokens

    def balance(self, kinds: _Kinds) -> Balance:
        """Returns the `Balance` for such weights and the last dispatch's replicas."""
        return self._of_group().balance(self.plan.exchange, self.replicas, kinds)

    def _of_group(self) -> _Shared:
        if self.group not in _shared:
            _shared[self.group] = _Shared(self.group)
        return _shared[self.group]
