# SPDX-License-Identifier: Apache-2.0
"""Moves tokens to their experts and back: torch tensors around the C++ exchange, called by
autograd.py. exchange_begin.py begins the calls; outputs.py has plans and a call's memory."""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft import _core, overlap_settings, ranges
from weft.arrivals import within
from weft.errors import InvalidArgument
from weft.exchange_begin import ExchangeBegin, filled
from weft.exchange_state import OnLoss
from weft.group import Group
from weft.outputs import (
    Beside,
    Combined,
    Dispatched,
    OutputPool,
    Plan,
    RowMarks,
    SkippedPlan,
)
from weft.placement import Balancing, Placement
from weft.tally import tally_of


class Exchange(ExchangeBegin):
    """One rank's end of the exchange. Collective: all ranks make the same calls in the same order.

    hidden: elements of a token, whose bytes must be a multiple of 16. num_experts: E, divisible by
    the number of ranks; expert e lives on rank e // (E / R). max_tokens, max_topk: a capacity to
    begin with; a `plan` call in which some rank needs more makes all ranks grow. (In budget mode
    on a GPU the host does not wait and cannot know: give the largest T beforehand.)
    device: of all tensors. num_sms: GPU multiprocessors a call may occupy, 0 by the measured
    table. copy_engines: room for calls by copy engines from the begin; without it there is room
    from the first plan on that is made beside computation, if copy engines are chosen there
    (docs/overlap.md). num_threads: CPU workers of this rank, 0 to share the host's cores.
    timeout: seconds, of every wait; None: WEFT_CALL_TIMEOUT_S, else 30; set-up waits for ranks for
    5 s at least. on_peer_loss: "fail", a rank that dies, leaves or lets the deadline pass ends the
    exchange on all others; or "shrink", where they go on without it: its tokens, and routes to its
    experts, are gone (docs/faults.md). On CPUs the call ends without it, on GPUs the next one
    raises `RanksLost`. "repeat" is the same, but on the GPUs of one host the call is made again
    before anything queued behind it, which takes a launch more in each. on_loss: called with the
    `CallReport` of a call that has lost ranks, by the thread of the call; it makes no calls, and
    what it raises goes to sys.unraisablehook. Raises InvalidArgument on every rank if any rank's
    arguments are wrong or differ, TimeoutError with the ranks that did not come, Unsupported where
    ranks cannot be lost.
    """

    def __init__(
        self,
        group: Group | dist.ProcessGroup | None = None,
        *,
        hidden: int,
        num_experts: int,
        max_tokens: int = 4096,
        max_topk: int = 8,
        device: torch.device | str = "cpu",
        num_sms: int = 0,
        copy_engines: bool = False,
        num_threads: int = 0,
        transport: str = "auto",
        timeout: float | None = None,
        on_peer_loss: str = "fail",
        on_loss: OnLoss | None = None,
    ) -> None:
        def settings() -> tuple[torch.device, dict[str, Any]]:
            where = torch.device(device)
            if where.type not in ("cpu", "cuda"):
                raise InvalidArgument(f"device = '{where}' (expected cpu or cuda)")
            if isinstance(hidden, int) and hidden % 4 != 0:
                raise InvalidArgument(
                    f"hidden = {hidden} (expected a multiple of 4 with float32, of 8 with bfloat16 "
                    "and float16: rows are multiples of 16 bytes)"
                )
            if where.type == "cuda" and where.index is None:
                where = torch.device("cuda", torch.cuda.current_device())
            found = {
                "hidden": hidden,
                "num_experts": num_experts,
                "transport": transport,
                "num_threads": num_threads,
                "num_sms": num_sms,
                "copy_engines": copy_engines,
                "timeout": _core.call_timeout(30.0) if timeout is None else timeout,
                "on_peer_loss": on_peer_loss,
            }
            if where.type == "cuda":
                found["gpu"] = where.index
            if on_loss is not None:
                filled(_core.ExchangeConfig(), {"on_loss": on_loss})
                found["on_loss"] = self._loss_teller()
            sizes = {"max_tokens": max_tokens, "max_topk": max_topk}
            filled(_core.ExchangeConfig(), found | sizes)
            return where, found

        self._on_loss = on_loss
        with within(timeout):
            self.group = group if isinstance(group, Group) else Group.of(group)
            self.device, self._settings = self.group.agreed("exchange", settings)
        self.hidden = hidden
        self.num_experts = num_experts
        self.num_local_experts = num_experts // self.group.num_ranks
        self._on_gpu = self.device.type == "cuda"  # to ask a device is slow
        self.gpu: int = self.device.index if self._on_gpu else -1  # -1: the CPU
        # Rows pass through hosts from GPU to GPU; source_idx is not to be had then.
        self.is_between_gpu_domains = self._on_gpu and len(self.group.domains) > 1
        self._has_copy_room = copy_engines
        self._pool: OutputPool | None = None  # of _core
        self._core: _core.Exchange | None = None
        self._in_graphs: list[_core.Exchange] = []  # outgrown ones, which replays still use
        self._open: tuple | None = None  # what a call that is still to be received writes and reads
        self._tally = tally_of(self.group)
        self._take(self._make(max_tokens, max_topk))
        self._tally.follow(self)
        _alive.add(self)

    # The default: at the end of the interpreter this module's names may be gone.
    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_core", None) is None or is_ending():
            return
        # A question to a GPU would break what is captured.
        if not (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            self._tally.settle(self._core)

    def close(self) -> None:
        """Lets go of the memory. Plans that are alive can still be used; graphs that hold calls of
        this exchange must not be replayed any more."""
        self._take(None)

    def plan(
        self,
        topk_idx: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        routing_map: Tensor | None = None,
        map_indices: Tensor | None = None,
        layout: str = "expert_major",
        pad_multiple: int = 1,
        expert_stride: int = 0,
        row_budget: int | None = None,
        overflow: str = "drop",
        order: str = "rank",
        balance: int | Balancing | Placement = 0,
        num_sms: int = 0,
    ) -> Plan:
        """Collective. Plans where tokens go.

        topk_idx [T, K] int64 or int32, -1 = no route, any other value outside [0, E) is refused;
        or routing_map [T, E] bool, at most 32 set in a row, with or without map_indices [T, any],
        the indices that the map was made of, refused alike. T may differ between ranks and be 0.
        weights fp32, [T, K] or [T, E]: kept for `combine(scale="plan")` only.
        layout "rank_major": a row for each (token, rank), by source rank, then token;
        "expert_major": a row for each route, by local expert (rounded up to pad_multiple rows),
        source rank, token, k; "expert_strided": the same with expert e's block at
        e * expert_stride (0: the largest block of the group).
        row_budget: rows of this rank's output, fixed; no wait for a GPU. Routes that do not fit
        are dropped, last slots first, and give zeros (overflow="drop"), or every rank raises
        ("error").
        order "rank": `combine` adds a token's rows on each rank, then what its ranks have; "topk":
        all its rows in the order of its choices, rounded once, so that the bits are the same for
        any number of ranks and hosts. Rows then return one for each route. Not with "rank_major",
        nor among GPUs of several hosts.
        balance: replicas of popular experts take rows of the busiest ranks (docs/balance.md): R of
        them on each rank, placed for this call, or as `Balancing` and `Placement` say. The experts
        of all layouts are then a rank's own and, after them, those of `plan.placement`: whoever
        computes needs their weights there. Not among GPUs of several hosts.
        """
        choices = {
            "layout": layout,
            "pad_multiple": pad_multiple,
            "expert_stride": expert_stride,
            "row_budget": row_budget,
            "overflow": overflow,
            "order": order,
            "balance": balance,
        }

        def call(core: _core.Exchange) -> _core.Plan:
            options = {"stream": self._stream(), "num_sms": num_sms, **choices}
            routing = (topk_idx, routing_map, weights, map_indices)
            return core.plan(routing, filled(_core.Options(), options))

        has_rows = self._given_rows(choices) is not None
        core, made = self._planned("plan", has_rows, call, topk_idx, routing_map)
        return self._plan_of(made, core, weights)

    def _plan_of(self, made: _core.Plan, core: _core.Exchange, weights: Tensor | None) -> Plan:
        plan = Plan(self, made, core)
        if weights is not None and weights.requires_grad:
            plan.wants_weight_gradient = torch.is_grad_enabled()
        return plan

    def dispatch(
        self,
        plan: Plan,
        x: Tensor,
        weights: Tensor | None = None,
        scales: Tensor | None = None,
        *,
        quantise: str = "none",
        global_scale: Tensor | None = None,
        num_sms: int = 0,
        copy_engines: bool | None = None,
    ) -> Dispatched:
        """Collective. Dispatches without gradients; arguments and results: see `weft.dispatch`."""
        self._check_plan("dispatch", plan)
        sent = (x, weights, scales, *_NOTHING_BESIDE, global_scale)

        def options(core: _core.Exchange) -> _core.Options:
            stored = filled(_core.Options(), {"quantise": quantise})
            return self._placed(stored, core, num_sms, copy_engines, is_dispatch=True)

        return Dispatched(*self._dispatched(plan.calls, plan.core, sent, False, options)[:3])

    def _dispatched(
        self,
        core: _core.Exchange,
        plan: _core.Plan,
        sent: tuple[Tensor | None, ...],
        experts: bool,
        options: Callable[[_core.Exchange], _core.Options],
    ) -> tuple[Tensor | None, ...]:
        """Returns rows, weights, scales, experts, sources, counts."""

        def call() -> tuple[Tensor | None, ...]:
            return core.dispatch(plan, sent, experts, options(core), self._pool_of(core))

        return self._called(core, "dispatch", call)

    def plan_and_dispatch(
        self,
        topk_idx: Tensor | None,
        x: Tensor,
        weights: Tensor | None = None,
        scales: Tensor | None = None,
        *,
        plan_weights: Tensor | None = None,
        routing_map: Tensor | None = None,
        map_indices: Tensor | None = None,
        quantise: str = "none",
        scale_rule: str = "exact",
        scale_layout: str = "row",
        global_scale: Tensor | None = None,
        beside: Beside | None = None,
        experts: bool = False,
        blocks: bool = False,
        num_sms: int = 0,
        copy_engines: bool | None = None,
        receives_later: bool = False,
        is_skipped: bool = False,
        **choices: Any,
    ) -> tuple:
        """Collective. Plans by topk_idx, plan_weights, routing_map, map_indices and `choices`
        (layout, pad_multiple, expert_stride, row_budget, overflow, order, balance), then dispatches
        without gradients; `weft.plan_and_dispatch` has them.

        ignores_unknown: values of topk_idx outside [0, E) are no route. scale_rule of `quantise`:
        "exact"; "clamped" for a largest magnitude of at least 1e-4; "power_of_two" rounds that
        scale up to one; "ue8m0" has its exponent + 127 in a byte; "nvfp4" has "exact" and "ue8m0",
        and "mxfp8" "exact" alone. scale_layout "column" ("expert_strided"): the scales of expert
        e's block lie by column, as [bytes / 4, stride] words of four bytes; "tile": in tiles of 128
        rows and a word, as [ceil(stride / 128) * 128 rows] (`block_formats.from_tiles`). beside:
        see `Beside`.

        Returns the plan and `Dispatched`. With experts ("rank_major") there is a third: int64
        [num_rows, K], this rank's expert, from 0, that choice k of the row's token goes to, -1
        where it goes elsewhere or nowhere, and in rows without a token. With blocks
        ("expert_strided") outputs are [El, stride, columns], a single column left out, and there is
        a third and a fourth: sources [El, stride, 2] and counts [El] of `Beside`.

        Faster than two calls. Where a GPU has to tell the number of rows, all else is ready by
        then. By topk_idx and without copy engines it is one launch on GPUs of one domain, in
        which rows travel while the plan is made, if max_tokens is at most 512 and max_tokens *
        max_topk of all ranks at most 32,768. The number of rows is given then (row_budget, or
        expert_stride with "expert_strided"; on all ranks or none) with overflow "drop"; or it is
        told, without replicas. With replicas rows travel once these are planned.

        receives_later: such a call without replicas, with a number of rows that is given, only
        sends, without a wait for any rank, and `receive` has the rest; elsewhere all is done at
        once. Each rank may choose for itself.

        is_skipped, where the number of rows is given: local, nothing is sent. Results have the same
        sizes, zeros for counts and undefined contents otherwise; the plan is a `SkippedPlan`. For
        ranks that leave out calls to catch up with others (`CallReport.calls_behind`).
        """
        routing = (topk_idx, routing_map, plan_weights, map_indices)
        told = beside if isinstance(beside, Beside) else _NOTHING_BESIDE
        sent = (x, weights, scales, *told, global_scale)
        given_rows = self._given_rows(choices)
        choices["quantise"], choices["blocks"] = quantise, blocks
        choices["scale_rule"], choices["scale_layout"] = scale_rule, scale_layout

        def options() -> _core.Options:
            if told is not beside and beside is not None:
                raise InvalidArgument(f"beside is a {type(beside).__name__} (expected a Beside)")
            return filled(_core.Options(), choices)

        runs = (num_sms, copy_engines, receives_later, is_skipped)
        plan, out = self._plan_and_dispatch(routing, sent, experts, options, given_rows, runs)
        result = plan, Dispatched(*out[:3])
        return (*result, out[3]) if experts else (*result, *out[4:]) if blocks else result

    def dispatch_blocks(
        self,
        options: _core.Options,
        topk_idx: Tensor,
        x: Tensor,
        weights: Tensor | None = None,
        *,
        count_sums: Tensor | None = None,
        global_scale: Tensor | None = None,
        receives_later: bool = False,
        is_skipped: bool = False,
    ) -> tuple[Plan | SkippedPlan, tuple[Tensor | None, ...]]:
        """Collective. Plans and dispatches with blocks, by options that the core has put together
        (`_core.check_block_dispatch`); count_sums: see `Beside`. Returns the plan; and rows,
        weights, scales, None, sources and counts."""
        routing = (topk_idx, None, None, None)
        sent = (x, weights, None, None, None, count_sums, global_scale)
        given_rows = options.expert_stride * self.num_local_experts
        runs = (0, None, receives_later, is_skipped)
        return self._plan_and_dispatch(routing, sent, False, lambda: options, given_rows, runs)

    def dispatch_blocks_at_once(
        self,
        tensors: tuple[Tensor | None, ...],
        sizes: tuple[int, int, int],
        formats: tuple[object, ...],
        receives_later: bool = False,
        stream: int | None = None,
    ) -> tuple[Plan, tuple[Tensor | None, ...]] | None:
        """Collective. Does `_core.check_block_dispatch` and `dispatch_blocks` in one step;
        tensors[2] is None. stream: the current one, if the caller knows it. Returns None, with
        nothing begun, where more is to be done: for other sizes than the exchange's, beside
        computation, or if calls are traced. Other ranks do not hear of an error raised before the
        call has begun."""
        core = self._core
        if core is None or ranges.IS_ON or overlap_settings.gpu_sms is not None:
            return None
        pool_of = self._pool_of if self._on_gpu else None
        is_later = receives_later and self._on_gpu
        stream = self._stream() if stream is None else stream
        given = (tensors, *sizes, formats, stream, pool_of, self._on_gpu, is_later)
        begun = _core.num_begun()
        try:
            found = core.dispatch_blocks(*given)
        except InvalidArgument as error:
            if self._on_gpu or _core.num_begun() == begun:
                raise
            if not self._grow(core, error, tensors[1], None):
                raise
            core = self.core
            found = self._called(core, "plan_and_dispatch", core.dispatch_blocks, *given)
        if found is None:
            return None
        made, problem, out = found
        if problem is not None:
            raise problem
        if is_later and core.is_open(made):
            self._open = (made, tensors[1], out)
        return Plan(self, made, core), out

    def combine_blocks_at_once(
        self,
        plan: Plan,
        tensors: tuple[Tensor | None, ...],
        stride: int,
        receives_later: bool = False,
        stream: int | None = None,
    ) -> Tensor | None:
        """Collective. Does `_core.check_block_combine` and `combine` with blocks, by the source's
        weights and indices; returns the tokens. stream, None, errors: see
        `dispatch_blocks_at_once`."""
        if ranges.IS_ON or overlap_settings.gpu_sms is not None or self.is_between_gpu_domains:
            return None
        is_later = receives_later and self._on_gpu
        stream = self._stream() if stream is None else stream
        how = (stride, self.hidden, stream, is_later)
        combined = plan.calls.combine_blocks(tensors, plan.core, *how)
        if is_later and combined is not None and self.is_open(plan):
            self._open = (plan.core, tensors[1], tensors[2], combined)
        return combined

    def dispatch_at_once(
        self,
        verb: str,
        tensors: tuple[Any, ...],
        how: tuple[Any, ...],
        num_sms: int,
        stream: int | None = None,
        routing: Callable[[], tuple[Tensor | None, Tensor | None]] | None = None,
    ) -> tuple[Plan, tuple[Tensor | None, ...], Any] | None:
        """Collective. Plans and dispatches by method `verb` of `_core.Exchange`: "dispatch_rows" of
        x, topk_idx and weights, or "dispatch_routes"; how: its arguments after the tensors. stream:
        the current one, if the caller knows it. routing: top-k and map, if not tensors[1].
        Returns the plan; rows, weights, scales, experts, sources and counts of `Beside`; and what
        `verb` tells of experts. None, and what it raises: see `dispatch_blocks_at_once`."""
        core = self._core
        if core is None or ranges.IS_ON or overlap_settings.gpu_sms is not None:
            return None
        pool_of = self._pool_of if self._on_gpu else None
        stream = self._stream() if stream is None else stream
        given = (tensors, *how, stream, self._sms(num_sms), pool_of)
        begun = _core.num_begun()
        try:
            found = getattr(core, verb)(*given)
        except InvalidArgument as error:
            if _core.num_begun() == begun:
                raise
            needs = (tensors[1], None) if routing is None else routing()
            if not self._grow(core, error, *needs):
                raise
            core = self.core
            found = self._called(core, "plan", getattr(core, verb), *given)
        if found is None:
            return None
        made, problem, out, counts, sent = found
        if problem is not None:
            raise problem
        if out is None:

            def options(core: _core.Exchange) -> _core.Options:
                return self._placed(_core.Options(), core, num_sms, None, is_dispatch=True)

            out = self._dispatched(core, made, sent, verb == "dispatch_rows", options)
        return Plan(self, made, core), out, counts

    def dispatch_again_at_once(
        self, plan: Plan, x: Tensor | tuple[Tensor, Tensor], num_sms: int, stream: int
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        """Collective. Dispatches x by `plan` and nothing else; returns the rows, or FP8 rows and
        their scales. None, errors: see `dispatch_blocks_at_once`."""
        if ranges.IS_ON or overlap_settings.gpu_sms is not None:
            return None
        core = plan.calls
        pool = self._pool_of(core) if self._on_gpu else None
        return core.dispatch_rows_again(x, plan.core, stream, self._sms(num_sms), pool)

    def combine_rows_at_once(
        self,
        plan: Plan,
        x: Tensor,
        weights: Tensor | None,
        num_sms: int,
        stream: int | None = None,
    ) -> tuple[Tensor, Tensor | None] | None:
        """Collective. Combines rows and weights. stream: as for `dispatch_at_once`. None, errors:
        see `dispatch_blocks_at_once`."""
        if ranges.IS_ON or overlap_settings.gpu_sms is not None:
            return None
        stream = self._stream() if stream is None else stream
        return plan.calls.combine_rows(x, weights, plan.core, stream, self._sms(num_sms))

    def _sms(self, num_sms: int) -> int:
        """Returns a call's multiprocessors without overlapped computation."""
        return (num_sms or self._settings["num_sms"]) if self._on_gpu else 0

    def _plan_and_dispatch(
        self,
        routing: tuple[Tensor | None, ...],
        sent: tuple[Tensor | None, ...],
        experts: bool,
        make_options: Callable[[], _core.Options],
        given_rows: int | None,
        runs: tuple[int, bool | None, bool, bool],
    ) -> tuple[Plan | SkippedPlan, tuple[Tensor | None, ...]]:
        """Returns the plan and rows, weights, scales, experts, sources, counts. make_options: makes
        the call's options; runs: num_sms, copy_engines, receives_later, is_skipped."""
        num_sms, copy_engines, receives_later, is_skipped = runs
        is_one_call = self._on_gpu and given_rows is not None
        is_later = is_one_call and receives_later

        def options(core: _core.Exchange) -> _core.Options:
            made = self._placed(make_options(), core, num_sms, copy_engines, is_dispatch=True)
            made.receives_later = is_later
            return made

        def call(core: _core.Exchange) -> tuple:
            pool_of = self._pool_of if self._on_gpu else None
            how = (options(core), pool_of, given_rows, is_one_call)
            return core.plan_and_dispatch(routing, sent, experts, *how)

        if is_skipped:
            core = self.core
            given = (routing, sent, experts, options(core), given_rows)
            num_calls, out = core.skipped_dispatch(*given)
            if out[5] is not None:
                out[5].zero_()
            return SkippedPlan(self, core, num_calls, sent[0].size(0), given_rows), out
        verb, has_rows = "plan_and_dispatch", given_rows is not None
        core, planned = self._planned(verb, has_rows, call, routing[0], routing[1])
        made, problem, out = planned
        if problem is not None:
            raise problem
        if out is None:
            out = self._dispatched(core, made, sent, experts, options)
        if is_later and core.is_open(made):
            self._open = (made, routing, out)
        return self._plan_of(made, core, routing[2]), out

    def receive(self, plan: Plan) -> None:
        """Local. Ends the call with `receives_later` that made the plan or combined by it, on the
        current stream, which must follow the call's stream: waits for the other ranks and places or
        sums the rows. Before that no result of the call may be read. One call is open at a time:
        the exchange's next call receives it first. Does nothing if it is received already.
        """
        options = filled(_core.Options(), {"stream": self._stream()} if self._on_gpu else {})
        plan.calls.receive(plan.core, options)
        if self._open is not None and self._open[0] is plan.core:
            self._open = None

    def is_open(self, plan: Plan) -> bool:
        """Local. Returns whether a call that made or used the plan is still to be received."""
        return plan.core is not None and plan.calls.is_open(plan.core)

    def combine(
        self,
        plan: Plan,
        rows: Tensor,
        row_weights: Tensor | None = None,
        *,
        scale: str = "none",
        source_weights: Tensor | None = None,
        source_idx: Tensor | None = None,
        out: Tensor | None = None,
        wire: str = "none",
        num_sms: int = 0,
        copy_engines: bool | None = None,
        receives_later: bool = False,
        ready: RowMarks | None = None,
        blocks: bool = False,
    ) -> Combined:
        """Collective. Combines without gradients; arguments and results: see `weft.combine`.

        source_idx, int64 or int32 like source_weights [T, K]: where it names no expert, the weight
        counts as zero; where it names another than the plan was made of, a CPU's call is refused,
        and a GPU's sum is NaN and its next call refused. out: memory for the tokens, contiguous.
        ready: marks of rows that are still being written, of all ranks or none; the call waits for
        them, on GPUs with num_sms multiprocessors. blocks: rows are [El, stride, H], as of a
        dispatch with blocks.

        receives_later, of all ranks or none: with scale "source" on GPUs of one domain, for calls
        as short as those that `plan_and_dispatch` makes in one launch, the call only sends, without
        a wait for any rank, and `receive` has the rest; elsewhere all is done at once.
        """
        self._check_plan("combine", plan)
        marks = ready or _NO_MARKS
        is_later = receives_later and self._on_gpu

        def call() -> Combined:
            brought = (rows, row_weights, source_weights, source_idx, marks.marks)
            options = filled(_core.Options(), {"scale": scale, "wire": wire, "blocks": blocks})
            self._placed(options, plan.calls, num_sms, copy_engines)
            options.mark_wanted, options.mark_rows = marks.wanted, marks.block_rows
            options.receives_later = is_later
            return Combined(*plan.calls.combine(plan.core, brought, out, options))

        combined = self._called(plan.calls, "combine", call)
        if is_later and self.is_open(plan):
            self._open = (plan.core, source_weights, source_idx, combined)
        return combined

    def _check_plan(self, verb: str, plan: Any) -> None:
        """Raises InvalidArgument, on all ranks, unless `plan` is of this exchange."""
        if isinstance(plan, Plan) and plan.exchange is self:
            return
        problem = f"{verb}: plan is a {type(plan).__name__} (expected what Exchange.plan returns)"
        if isinstance(plan, Plan):
            problem = f"{verb}: plan is of another exchange, for {_sizes(plan.exchange)}"
            problem += f" (this one is for {_sizes(self)})"
        self.refuse(verb, problem)
        raise InvalidArgument(problem, rank=self.rank)

    def check(self) -> None:
        """Raises the error that a finished GPU call found; on a CPU why the exchange can no longer
        be used."""
        self.core.check()


def _sizes(exchange: Exchange) -> str:
    return f"hidden = {exchange.hidden}, num_experts = {exchange.num_experts}"


def plan_given(verb: str, plan: Any, beside: Any) -> Plan:
    """Returns the plan. Raises InvalidArgument for anything else, on all ranks if `plan` or
    `beside` tells the exchange, or only one is alive."""
    if isinstance(plan, Plan):
        return plan
    told = (getattr(one, "exchange", one) for one in (plan, beside))
    exchanges = [one for one in told if isinstance(one, Exchange)] or list(_alive)
    if len(exchanges) == 1:
        exchanges[0]._check_plan(verb, plan)
    raise InvalidArgument(f"{verb}: plan is a {type(plan).__name__} (expected a weft.Plan)")


_alive: weakref.WeakSet[Exchange] = weakref.WeakSet()
_NOTHING_BESIDE = Beside()
_NO_MARKS = RowMarks()
