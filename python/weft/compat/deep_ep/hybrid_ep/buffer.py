# SPDX-License-Identifier: Apache-2.0
"""`HybridEPBuffer`: the interface of `deep_ep`'s hybrid-ep branch, on Weft exchanges.

Same names, arguments, results and row order. What Weft lifts:

* Any number of tokens, another one on every rank, none included; no multiple of 64. Row bytes need
  only be a multiple of 16; there is no largest token count, and no rule about chunks, probability
  rows or pipeline stages, which `deep_ep` needs for its bulk copies and network queues.
* topk_idx may contain -1 (no route) anywhere; other numbers outside [0, E) are refused.
* combine takes bf16, fp16 and fp32, and inputs need not be contiguous.
* The overflow flag, item -1 of a permuted handle, is always defined.
* A handle remembers its number of rows, so that reuse does not need num_permuted_tokens; dropped
  rows come back as zeros.

"Fused" and unfused are the same code here, since rows are written once, to their final place,
either way; the arguments are accepted. Results carry no gradient, as with `deep_ep`.
"""

import operator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft import Exchange, Group, Plan, _core
from weft.run.calls import count

from ..checks import (
    FLOATS,
    INTEGERS,
    check,
    check_handle,
    check_least,
    check_optional,
    check_tensor,
    count_of,
    warn_deprecated,
)
from ..layout import Routing, ranks_per_domain, routing_of, scatter_columns, spread
from ..payload import (
    Payload,
    Received,
    bring_back,
    numbers,
    received_numbers,
    received_topk,
    round_up,
    topk_of_map,
)
from ..runtime import MIN_TOPK, Call, ExchangePool, found_at_once
from .handle import HybridEPConfig, HybridEPConfigurer, HybridEPHandle, PermuteHandle, PlainHandle

_MIN_CAPACITY = 512
_PINNED_TOGETHER = 64  # calls' counts per pinning


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """Local. Turns topk_idx int32 or int64 [T, K] and topk_weights fp32 [T, K] into the routing_map
    bool [T, E] and probs fp32 [T, E] (None without weights) of `HybridEPBuffer`. Numbers outside
    [0, E) are no route. Raises InvalidArgument (also an AssertionError)."""
    check_tensor("topk_idx", topk_idx, INTEGERS, [num_of_tokens, "K"])
    check_optional("topk_weights", topk_weights, torch.float32, topk_idx.shape)
    return spread(topk_idx, topk_weights, num_of_experts)


class HybridEPBuffer:
    """Moves tokens to the ranks of their experts and back, with or without grouping by expert.

    Collective, as are all its calls that move tokens; on a GPU they are queued on the current
    stream. group: the ranks, in whose order experts lie. max_num_of_tokens_per_rank: a capacity to
    begin with. Counts of SMs are those a call may occupy, None or 0: by Weft's measured table; of
    the others, num_sms_preprocessing_api and the block counts have no meaning here. The last two
    arguments are deprecated. Calls raise InvalidArgument (also an AssertionError).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        del load_cached_kernels, use_shared_buffer, enable_custom_allgather  # nothing like it here
        if num_of_hybrid_ep_ranks_per_nvlink_domain is not None:
            warn_deprecated("HybridEPBuffer", "num_of_hybrid_ep_ranks_per_nvlink_domain")
        if use_mnnvl is not None:
            warn_deprecated("HybridEPBuffer", "use_mnnvl")
        ranks = Group.of(group)

        def checked() -> tuple[int, int]:
            check_least("hidden_dim", hidden_dim)
            check_least("num_local_experts", num_local_experts)
            return ranks_per_domain(ranks), operator.index(max_num_of_tokens_per_rank)

        with Call("HybridEPBuffer"):
            domain, tokens = ranks.agreed("HybridEPBuffer", checked)
        self.group = group
        self.rank: int = ranks.rank
        self.group_size: int = ranks.num_ranks
        self.num_of_hybrid_ep_ranks_per_nvlink_domain: int = domain
        self.local_rank: int = self.rank % domain
        self.node_rank: int = self.rank // domain
        self.num_of_nodes: int = self.group_size // domain
        self.runtime = ExchangePool(ranks)
        self._pinned: dict[int, list[Tensor]] = {}  # memory for counts, by their number
        # Callers give their own T; ranks' may differ.
        (most,) = max(ranks.gather_numbers(tokens))
        capacity = max(most, _MIN_CAPACITY)
        self.configurer = HybridEPConfigurer(
            HybridEPConfig(
                hidden_dim=hidden_dim,
                max_num_of_tokens_per_rank=round_up(capacity, 64),
                num_of_experts_per_rank=num_local_experts,
                num_of_ranks_per_node=domain,
                num_of_nodes=self.num_of_nodes,
                use_fp8=use_fp8,
                num_of_blocks_dispatch_api=num_sms_dispatch_api or 0,
                num_of_blocks_combine_api=num_sms_combine_api or 0,
                num_of_blocks_preprocessing_api=num_sms_preprocessing_api or 0,
                num_blocks_permute=num_blocks_permute or 0,
                num_blocks_unpermute=num_blocks_unpermute or 0,
            )
        )

    def empty_jit_cache(self) -> None:
        """Does nothing: Weft compiles no kernels at run time."""

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **kwargs: Any,
    ) -> HybridEPConfig:
        """Raises the capacity to num_of_tokens_per_rank, the same on all ranks; never lowers it.

        The other arguments only appear in the settings that are returned, kwargs as attributes of
        their own. An exchange that is too small is replaced at its next use (collective); handles
        keep working.
        """
        if num_of_tokens_per_rank is not None:
            self._raise_capacity(num_of_tokens_per_rank)
        given = {
            "hidden_dim": hidden_dim,
            "num_of_experts_per_rank": num_local_experts,
            "pad_multiple": pad_multiple or None,
            "use_fp8": None if use_fp8 is None else bool(use_fp8),
            "fuse_permute_dispatch": bool(fuse_permute_dispatch),
        }
        given = {name: value for name, value in given.items() if value is not None}
        return self._settings.changed(**given, **kwargs)

    @property
    def _settings(self) -> HybridEPConfig:
        return self.configurer.buffer_config

    def _raise_capacity(self, num_tokens: int) -> None:
        """Raises the tokens of a rank that need no growth."""
        most = max(self._settings.max_num_of_tokens_per_rank, round_up(num_tokens, 16))
        self._settings.max_num_of_tokens_per_rank = most

    def _find(
        self,
        call: Call,
        payload: Payload,
        given: tuple,
        non_blocking: bool,
        slots: int | None,
        **options: Any,
    ) -> Routing:
        """Returns the caller's routing (see `routing_of`), and sets the exchange of `call`.

        given: the routing; the experts of all ranks, and of each: without either a map says it, or
        the buffer. slots: the caller's num_of_tokens_per_rank.
        """
        *given, total, per_rank = given
        total = self._num_experts(total, per_rank, has_indices=given[2] is not None)
        routing = routing_of(given, total, may_wait=not non_blocking)
        num_tokens = routing.map.size(0)
        check(
            payload.num_tokens == num_tokens,
            f"hidden has {payload.num_tokens} rows (expected {num_tokens}, as the routing has)",
        )
        if non_blocking and payload.device.type == "cuda":
            # Ranks do not learn others' T here: without `slots` all T are equal.
            self._raise_capacity(payload.num_tokens if slots is None else slots)
        key = (payload.hidden, routing.map.size(1), payload.device)
        most = self._settings.max_num_of_tokens_per_rank
        call.plans(key, most, lambda: max(MIN_TOPK, routing.most_routes()), **options)
        return routing

    def _num_experts(
        self, total: int | None, per_rank: int | None, has_indices: bool
    ) -> int | None:
        """Returns the experts of all ranks, None if a map says."""
        if total is not None and per_rank is not None:
            check(
                total == per_rank * self.group_size,
                f"num_of_experts = {total}, num_of_experts_per_rank = {per_rank} "
                f"(expected {per_rank * self.group_size} with {self.group_size} ranks)",
            )
        if total is None and per_rank is None and has_indices:
            per_rank = self._settings.num_of_experts_per_rank
        return total if per_rank is None else per_rank * self.group_size

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: Any = None,
        pad_multiple: int | None = None,
        handle: PermuteHandle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
        num_of_tokens_per_rank: int | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, PermuteHandle]:
        """Collective. Sends tokens to experts, a row per route, grouped by local expert.

        hidden [T, H] bf16, fp16 or fp32, or a one-byte dtype (FP8) with scaling_factor
        [T, H / 128]. routing_map bool [T, E] with probs fp32 [T, E] or None; or topk_idx [T, K]
        with topk_weights fp32 [T, K] or None and num_of_experts; or the handle of an earlier call,
        whose routing is used again, with or without probs.
        pad_multiple: rows of an expert are rounded up to it; None and 0: not.

        Returns (rows, probs, scaling_factor, tokens_per_expert, handle):
        rows [P, H]: by expert, then source rank, then token; padding rows zero;
        probs fp32 [P] and scaling_factor [P, H / 128], zero in padding; None if not given (scaling
        factors: nor with a wider dtype);
        tokens_per_expert int64 [El]: rows of each expert, padding included; None with a handle.

        Blocking: P is what is needed, or num_permuted_tokens, which must be enough (else every
        rank raises); tokens_per_expert lies on the host (pinned on a machine with GPUs).
        non_blocking: P is num_permuted_tokens, a multiple of pad_multiple; no wait for a GPU, so
        that the call can be captured; tokens_per_expert lies beside the rows. What does not fit
        is dropped, later experts and later rows first; handle[-1], int32 [1], is then 1.
        Rows past the last expert's are uninitialised in either mode, probs too.
        With a handle P is its number of rows; num_permuted_tokens must be that or None. One on a
        GPU is not read, which would wait.
        num_of_tokens_per_rank: the most that any rank has here, the same on all; a larger T is
        refused. Without waiting a GPU cannot learn of another rank's T: one above the buffer's
        capacity needs this number then, or must be the same on all ranks
        (`update_template_config` raises the capacity beforehand).
        """
        name = "dispatch_with_permute"
        if num_dispatched_tokens is not None:
            warn_deprecated(name, "num_dispatched_tokens")
        if use_host_meta is not None:
            warn_deprecated(name, "use_host_meta", "read as: not non_blocking")
            non_blocking = not use_host_meta
        is_usual = not (non_blocking or use_fp8) and _has_slots(hidden, num_of_tokens_per_rank)
        if handle is num_permuted_tokens is None and is_usual:
            tensors = (hidden, topk_idx, topk_weights, routing_map, probs)
            sizes = (num_of_experts, num_of_experts_per_rank, pad_multiple, fuse_permute_dispatch)
            made = self._dispatch_at_once(tensors, *sizes)
            if made is not None:
                return made
        verb = "plan_and_dispatch" if handle is None else "dispatch"
        wants = {
            "layout": "expert_major",
            "row_budget": 0 if non_blocking else None,
            "overflow": "drop" if non_blocking else "error",
        }
        with Call(name, self.runtime, verb, **wants) as call:
            if handle is not None:
                _check_reuse(handle, num_permuted_tokens, pad_multiple)
                call.by(handle.plan)
            payload = _payload(hidden, scaling_factor, num_of_tokens_per_rank)
            check(
                not use_fp8 or hidden.element_size() == 1,
                f"use_fp8 with {hidden.dtype} (expected a one-byte dtype)",
            )
            if handle is not None:
                out = self._again(call, handle, payload, (probs, topk_idx, topk_weights))
                tokens_per_expert = None
            else:
                given = (routing_map, probs, topk_idx, topk_weights)
                given += (num_of_experts, num_of_experts_per_rank)
                wants["pad_multiple"] = pad_multiple or 1
                wants["row_budget"] = _rows_of(num_permuted_tokens, pad_multiple, non_blocking)
                slots = num_of_tokens_per_rank
                routing = self._find(call, payload, given, non_blocking, slots, **wants)
                out = payload.send(
                    call,
                    None,
                    routing.probs,
                    num_sms=self._settings.num_of_blocks_dispatch_api,
                    routing_map=routing.map,
                    map_indices=routing.indices,
                )
                # After the launch, which a GPU awaits once it has told the number of rows.
                config = self._config(hidden, out.plan, pad_multiple, fuse_permute_dispatch)
                handle = PermuteHandle(out.plan, config, has_budget=non_blocking)
                if non_blocking:
                    tokens_per_expert = out.plan.padded_rows_per_expert.clone()
                else:
                    tokens_per_expert = self._counts_of(out.plan)
        row_probs = None if out.weights is None else out.weights.view(-1)
        return out.rows, row_probs, out.scales, tokens_per_expert, handle

    def _dispatch_at_once(
        self,
        tensors: tuple[Tensor | None, ...],
        num_experts: int | None,
        per_rank: int | None,
        pad_multiple: int | None,
        fuse: bool,
    ) -> tuple | None:
        """Does a common `dispatch_with_permute` by one call of the core. tensors: hidden, topk_idx,
        topk_weights, routing_map, probs. Returns None, with nothing begun, for an uncommon call or
        wrong arguments."""
        name, told, exchange = "dispatch_with_permute", _core.num_told(), None
        try:
            pool, settings = self.runtime, self._settings
            exchange = pool.planned.get(False)
            if exchange is None or exchange.max_tokens < settings.max_num_of_tokens_per_rank:
                return None
            hidden, topk_idx, topk_weights, routing_map, _ = tensors
            total = self._num_experts(num_experts, per_rank, topk_idx is not None)

            def routing() -> tuple[None, Tensor]:
                given = routing_map
                if given is None:
                    given, _ = spread(topk_idx, topk_weights, total)
                return None, given

            how = (total, pad_multiple or 1)
            num_sms = settings.num_of_blocks_dispatch_api
            made = exchange.dispatch_at_once(
                "dispatch_routes", tensors, how, num_sms, routing=routing
            )
        except BaseException as error:
            wants = {"layout": "expert_major", "overflow": "error"}
            return found_at_once(error, told, name, self.runtime, by=exchange, **wants)
        if made is None:
            return None
        pool.last = exchange
        count(name)
        plan, (rows, probs, *_), _ = made
        config = self._config(hidden, plan, pad_multiple, fuse)
        handle = PermuteHandle(plan, config, has_budget=False)
        row_probs = None if probs is None else probs.view(-1)
        return rows, row_probs, None, self._counts_of(plan), handle

    def _counts_of(self, plan: Plan) -> Tensor:
        """Returns rows of each expert with padding, int64 [El] on the host, pinned on a machine
        with GPUs."""
        memory = None if plan.exchange.gpu < 0 else self._pinned_counts(plan.exchange)
        return plan.core.padded_rows_on_host(memory)

    def _pinned_counts(self, exchange: Exchange) -> Tensor:
        """Returns unshared pinned memory for counts."""
        left = self._pinned.setdefault(exchange.num_local_experts, [])
        try:
            return left.pop()
        except IndexError:  # pinning takes as long for many of them, which share nothing but memory
            size = (_PINNED_TOGETHER, exchange.num_local_experts)
            many = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)
            *others, one = (row.data for row in many.unbind(0))
            left.extend(others)
            return one

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: PermuteHandle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
        non_blocking: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Collective. Sums rows, in the order of `dispatch_with_permute`, into their tokens by the
        dispatch's handle, which must be given.

        hidden [P, H] bf16, fp16 or fp32, unweighted: a rank's rows of a token are summed in fp32
        and rounded, then ranks are, in ascending order. probs fp32 [P]. Padding and slack rows are
        not read. Returns ([T, H], fp32 [T, E] or None): zeros for tokens without rows, and for
        probabilities where the handle's routing has no route.
        """
        name = "combine_with_unpermute"
        del fuse_unpermute_combine, non_blocking  # the same either way: it waits for no GPU
        if num_dispatched_tokens is not None:
            warn_deprecated(name, "num_dispatched_tokens")
        made = self._combine_at_once(hidden, probs, handle, pad_multiple)
        if made is not None:
            return made
        with Call(name, self.runtime, "combine") as call:
            _check_reuse(handle, None, pad_multiple)
            call.by(handle.plan)
            row_probs = None if probs is None else probs.reshape(-1, 1)
            return self._bring_back(call, hidden, row_probs)

    def _combine_at_once(
        self,
        hidden: Tensor,
        probs: Tensor | None,
        handle: PermuteHandle | None,
        pad_multiple: int | None,
    ) -> tuple | None:
        """Does a common `combine_with_unpermute` by one call of the core. None: see
        `_dispatch_at_once`."""
        name, told = "combine_with_unpermute", _core.num_told()
        try:
            _check_reuse(handle, None, pad_multiple)
            plan, num_sms = handle.plan, self._settings.num_of_blocks_combine_api
            exchange = plan.exchange
            made = exchange.combine_rows_at_once(plan, hidden, probs, num_sms)
        except BaseException as error:
            return found_at_once(error, told, name, self.runtime, "combine", handle)
        if made is not None:
            self.runtime.last = exchange
            count(name)
        return made

    # One row for each token on each rank. D: ranks of an NVLink domain.

    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: Any = None,
        handle: PlainHandle | None = None,
        num_of_tokens_per_rank: int | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, PlainHandle]:
        """Collective. Sends tokens to their experts' ranks: a row per token on each rank.

        hidden [T, H] and scaling_factor, the routing, and num_of_tokens_per_rank as
        `dispatch_with_permute` takes them.
        num_dispatched_tokens: rows of the result, if the caller knows them already; nothing waits
        for a GPU then, and what does not fit is dropped, last rows first.
        num_dispatched_tokens_tensor has no meaning here.

        Returns (rows, probs, scaling_factor, handle): rows [N, H] by source rank, then token;
        probs fp32 [N, El * D]: the columns of this rank's experts within its domain, zero where a
        row has no route, zero in the other columns; None if not given.
        """
        del num_dispatched_tokens_tensor
        verb = "plan" if handle is None else "dispatch"
        wants = {"layout": "rank_major", "row_budget": None if num_dispatched_tokens is None else 0}
        with Call("dispatch", self.runtime, verb, **wants) as call:
            if handle is not None:
                call.by(check_handle(handle, PlainHandle).plan)
            payload = _payload(hidden, scaling_factor, num_of_tokens_per_rank)
            if handle is not None:
                out = self._again(call, handle, payload, (probs, topk_idx, topk_weights))
                return out.rows, self._columns_of(handle, out.weights), out.scales, handle
            is_known = num_dispatched_tokens is not None
            if is_known:
                wants["row_budget"] = count_of("num_dispatched_tokens", num_dispatched_tokens)
            given = (routing_map, probs, topk_idx, topk_weights, num_of_experts, None)
            slots = num_of_tokens_per_rank
            routing = self._find(call, payload, given, is_known, slots, **wants)
            routes = {"routing_map": routing.map, "map_indices": routing.indices}
            plan = call.exchange.plan(**routes, **wants)
            call.by(plan, "dispatch")
            chosen = numbers(topk_of_map(routing.map, plan.topk))
            num_sms = self._settings.num_of_blocks_dispatch_api
            out = payload.send(call, None, routing.probs, (chosen,), num_sms)
            ids = received_topk(plan, received_numbers(plan, out.beside[0]))
            handle = PlainHandle(plan, self._config(hidden, plan), ids)
        return out.rows, self._columns_of(handle, out.weights), out.scales, handle

    def combine(
        self,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: PlainHandle | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Collective. Sums the rows of `dispatch`, unweighted, into their tokens.

        hidden [N, H] bf16, fp16 or fp32; probs fp32 [N, El * D], of which this rank's columns are
        read where a row has a route. Returns ([T, H], fp32 [T, E] or None), zero without routes.
        """
        with Call("combine", self.runtime, "combine") as call:
            check_handle(handle, PlainHandle)
            plan = call.by(handle.plan)
            row_probs = None
            if probs is not None:
                check_tensor("probs", probs, None, [plan.num_rows, self._num_columns(plan)])
                at = self._first_column(plan) + handle.ids.clamp(min=0).to(torch.int64)
                row_probs = torch.where(handle.ids >= 0, probs.gather(1, at), 0.0)
            return self._bring_back(call, hidden, row_probs)

    def _again(
        self, call: Call, handle: HybridEPHandle, payload: Payload, routing: tuple
    ) -> Received:
        """Dispatches by a handle. routing: probs, or topk_idx and topk_weights instead."""
        probs, topk_idx, topk_weights = routing
        plan = handle.plan
        check_optional("probs", probs, torch.float32, [plan.num_tokens, plan.num_experts])
        if topk_idx is not None and topk_weights is not None:
            _, probs = spread(topk_idx, topk_weights, plan.num_experts)
        return payload.send(call, None, probs, num_sms=self._settings.num_of_blocks_dispatch_api)

    def _bring_back(self, call: Call, hidden: Tensor, row_probs: Tensor | None) -> tuple:
        check_tensor("hidden", hidden, FLOATS, [call.plan.num_rows, call.exchange.hidden])
        return bring_back(call, hidden, row_probs, num_sms=self._settings.num_of_blocks_combine_api)

    def _config(
        self, hidden: Tensor, plan: Plan, pad_multiple: int | None = None, fuse: bool = False
    ) -> HybridEPConfig:
        """Returns a call's settings."""
        settings = self._settings
        return settings.changed(
            hidden_dim=hidden.size(1),
            num_of_experts_per_rank=plan.num_local_experts,
            pad_multiple=pad_multiple or settings.pad_multiple,
            use_fp8=hidden.itemsize == 1,
            fuse_permute_dispatch=bool(fuse),
        )

    def _first_column(self, plan: Plan) -> int:
        """Returns this rank's first expert in its domain."""
        return self.local_rank * plan.num_local_experts

    def _num_columns(self, plan: Plan) -> int:
        """Counts experts of the domain."""
        return plan.num_local_experts * self.num_of_hybrid_ep_ranks_per_nvlink_domain

    def _columns_of(self, handle: PlainHandle, row_weights: Tensor | None) -> Tensor | None:
        """Spreads fp32 [N, K], by choice, to fp32 [N, El * D], by expert."""
        if row_weights is None:
            return None
        plan = handle.plan
        at = torch.where(handle.ids >= 0, handle.ids + self._first_column(plan), -1)
        return scatter_columns(at, row_weights, self._num_columns(plan))


def _has_slots(hidden: Tensor, slots: int | None) -> bool:
    return slots is None or (isinstance(slots, int) and len(hidden) <= slots)


def _payload(hidden: Tensor, scaling_factor: Tensor | None, slots: int | None) -> Payload:
    """Makes the payload; only rows of one byte have factors. slots: num_of_tokens_per_rank."""
    has_scales = scaling_factor is not None and hidden.element_size() == 1
    payload = Payload((hidden, scaling_factor) if has_scales else hidden, None, "hidden")
    check(
        _has_slots(hidden, slots),
        f"num_of_tokens_per_rank = {slots} (expected at least {payload.num_tokens}, hidden's)",
    )
    return payload


def _rows_of(num_permuted_tokens: Any, pad_multiple: int | None, non_blocking: bool) -> int | None:
    """Returns rows to allocate; None: as needed."""
    if num_permuted_tokens is None:
        check(not non_blocking, "The num_permuted_tokens is required for non-blocking mode.")
        return None
    rows = count_of("num_permuted_tokens", num_permuted_tokens)
    check(
        not non_blocking or not pad_multiple or rows % pad_multiple == 0,
        f"num_permuted_tokens = {rows} (expected a multiple of pad_multiple = {pad_multiple} in "
        "non-blocking mode)",
    )
    return rows


def _check_reuse(
    handle: HybridEPHandle, num_permuted_tokens: Any, pad_multiple: int | None
) -> None:
    check_handle(handle, PermuteHandle)
    plan = handle.plan
    check(
        not pad_multiple or pad_multiple == plan.pad_multiple,
        f"pad_multiple = {pad_multiple} (the handle has {plan.pad_multiple})",
    )
    is_on_gpu = isinstance(num_permuted_tokens, Tensor) and num_permuted_tokens.is_cuda
    if num_permuted_tokens is not None and not is_on_gpu:
        rows = count_of("num_permuted_tokens", num_permuted_tokens)
        check(
            rows == plan.num_rows,
            f"num_permuted_tokens = {rows} (the handle has {plan.num_rows} rows)",
        )
