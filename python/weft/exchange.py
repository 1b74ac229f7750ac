# SPDX-License-Identifier: Apache-2.0
"""Moves tokens to their experts and back: torch tensors around the C++ exchange. autograd.py calls
it; outputs.py has plans and the memory of a call."""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from weft import _core, overlap_settings, ranges
from weft.errors import Error, InvalidArgument
from weft.exchange_state import ExchangeState, OnLoss
from weft.group import Group
from weft.outputs import Beside, Combined, Dispatched, OutputPool, Plan, RowMarks
from weft.placement import Balancing, Placement, core_balance, num_replicas
from weft.tally import tally_of


class Exchange(ExchangeState):
    """One rank's end of the exchange. Collective: all ranks make the same calls in the same order.

    hidden: elements of a token, whose bytes must be a multiple of 16. num_experts: E, divisible by
    the number of ranks; expert e lives on rank e // (E / R). max_tokens, max_topk: a capacity to
    begin with; a `plan` call in which some rank needs more makes all ranks grow. (In budget mode
    on a GPU the host does not wait and cannot know: give the largest T beforehand.)
    device: of all tensors. num_sms: GPU multiprocessors a call may occupy, 0 by the measured
    table. copy_engines: room for calls by copy engines from the begin; without it there is room
    from the first plan on that is made beside computation, if copy engines are chosen there
    (docs/overlap.md). num_threads: CPU workers of this rank, 0 to share the host's cores.
    timeout: seconds, of every wait. on_peer_loss: "fail", a rank that dies, leaves or lets the
    deadline pass ends the exchange on all others; or "shrink", on CPUs of one host, where the call
    ends without it and so do all later ones: its tokens, and routes to its experts, are gone
    (docs/faults.md). on_loss: called with the `CallReport` of a call that has lost ranks, by the
    thread of the call before it returns; it makes no calls, and what it raises goes to
    sys.unraisablehook. Raises InvalidArgument on every rank if any rank's arguments are wrong or
    differ, Unsupported where ranks cannot be lost.
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
        timeout: float = 30.0,
        on_peer_loss: str = "fail",
        on_loss: OnLoss | None = None,
    ) -> None:
        self.group = group if isinstance(group, Group) else Group.of(group)

        def settings() -> tuple[torch.device, dict[str, Any]]:
            where = torch.device(device)
            if where.type == "cuda" and where.index is None:
                where = torch.device("cuda", torch.cuda.current_device())
            found = {
                "hidden": hidden,
                "num_experts": num_experts,
                "transport": transport,
                "num_threads": num_threads,
                "num_sms": num_sms,
                "copy_engines": copy_engines,
                "timeout": timeout,
                "on_peer_loss": on_peer_loss,
            }
            if where.type == "cuda":
                found["gpu"] = where.index
            if on_loss is not None:
                _filled(_core.ExchangeConfig(), {"on_loss": on_loss})
                found["on_loss"] = self._loss_teller()
            sizes = {"max_tokens": max_tokens, "max_topk": max_topk}
            _filled(_core.ExchangeConfig(), found | sizes)
            return where, found

        self._on_loss = on_loss
        self.device, self._settings = self.group.agreed("exchange", settings)
        self.hidden = hidden
        self.num_experts = num_experts
        self.max_tokens = max_tokens
        self.max_topk = max_topk
        self.num_local_experts = num_experts // self.group.num_ranks
        self._on_gpu = self.device.type == "cuda"  # to ask a device is slow
        # Rows pass through hosts from GPU to GPU; source_idx is not to be had then.
        self.is_between_gpu_domains = self._on_gpu and len(self.group.domains) > 1
        self._has_copy_room = copy_engines
        self._pool: OutputPool | None = None  # of _core
        self._core: _core.Exchange | None = None
        self._open: tuple | None = None  # what a call that is still to be received writes and reads
        self._tally = tally_of(self.group)
        self._take(self._make())
        self._tally.follow(self)

    def _make(self) -> _core.Exchange:
        sizes = {"max_tokens": self.max_tokens, "max_topk": self.max_topk}
        config = _filled(_core.ExchangeConfig(), sizes | self._settings)
        core = _core.Exchange(self.group.core, config)
        self._take_sizes(core)  # a rank that comes back has those of the others
        return core

    def _take(self, core: _core.Exchange | None) -> None:
        self._tally.settle(self._core)
        self._core, self._pool = core, None

    def __del__(self) -> None:
        if getattr(self, "_core", None) is None or sys.is_finalizing():
            return
        # A question to a GPU would break what is captured.
        if not (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            self._tally.settle(self._core)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def num_ranks(self) -> int:
        return self.group.num_ranks

    @property
    def core(self) -> _core.Exchange:
        """Raises InvalidArgument after `close`."""
        if self._core is None:
            raise InvalidArgument("exchange: it was closed (make a new one)", rank=self.rank)
        return self._core

    def close(self) -> None:
        """Lets go of the memory. Plans that are alive can still be used."""
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
        """Collective. Where every token goes.

        topk_idx [T, K] int64 or int32, -1 = no route, any other value outside [0, E) is refused;
        or routing_map [T, E] bool, at most 32 set in a row, with or without map_indices [T, any],
        the indices that it was made of, which are refused alike. T may differ between ranks and be
        0.
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
        computes needs their weights there. On CPUs.
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
            return core.plan(routing, _filled(_core.Options(), options))

        has_rows = self._given_rows(choices) is not None
        core, made = self._planned("plan", has_rows, call, topk_idx, routing_map)
        return Plan(self, made, core)

    def _planned(
        self,
        verb: str,
        has_rows: bool,
        call: Callable[[_core.Exchange], Any],
        topk_idx: Tensor | None = None,
        routing_map: Tensor | None = None,
        wanted: tuple[int, int] | None = None,
    ) -> tuple[_core.Exchange, Any]:
        """Collective: call(core), on a core that has grown if this one was too small for the plan.
        verb: see `refuse`. has_rows: their number is given. wanted: the hidden size and number of
        experts that the caller's tensors have, if not this exchange's; zeros: unknown."""
        wanted = wanted or (self.hidden, self.num_experts)
        # All ranks are beside computation, or none.
        if self._on_gpu and not self._has_copy_room and self._core and self._chooses_copies():
            self._make_copy_room()
        # On a GPU nobody waited then, and the others do not know yet what was refused.
        may_grow = not (self._on_gpu and has_rows)
        while True:
            core = self.core  # one that was closed does not grow
            begun = _core.num_begun()
            try:
                return core, self._called(core, verb if has_rows else "plan", call, core)
            except BaseException as error:
                was_refused = isinstance(error, InvalidArgument) or _core.num_begun() == begun
                if not (was_refused and may_grow and self._is_usable(core)):
                    raise
                if not self._grow(wanted, topk_idx, routing_map):
                    raise
                if not isinstance(error, Exception):
                    call = _raising(error)  # the others ask again, an interrupt is not forgotten
            may_grow = False

    def _is_usable(self, core: _core.Exchange) -> bool:
        """Whether the others have come to a call that this rank refused. A GPU cannot tell yet."""
        try:
            if not self._on_gpu:
                core.check()
        except Error:
            return False
        return True

    def _called(
        self, core: _core.Exchange, verb: str, call: Callable[..., Any], *given: Any
    ) -> Any:
        """call(*given), which makes a call of the core. If it fails before that, the other ranks
        hear why."""
        begun = _core.num_begun()
        if ranges.IS_ON:
            ranges.begin(verb, self.group)
        try:
            return call(*given)
        except BaseException as error:
            if _core.num_begun() == begun:
                options = _filled(_core.Options(), {"stream": self._stream()})
                core.refuse(verb, str(error) or type(error).__name__, options)
            raise
        finally:
            if ranges.IS_ON:
                ranges.end()

    def _given_rows(self, choices: dict[str, Any]) -> int | None:
        """How many rows there are, if nobody has to wait to hear it."""
        if choices.get("overflow", "drop") != "drop":
            return None
        if choices.get("layout") == "expert_strided":
            stride = choices.get("expert_stride", 0)
            if isinstance(stride, int) and stride > 0:
                replicas = num_replicas(choices.get("balance", 0))
                return stride * (self.num_local_experts + replicas)
        return choices.get("row_budget")

    def _grow(
        self, wanted: tuple[int, int], topk_idx: Tensor | None, routing_map: Tensor | None
    ) -> bool:
        """Collective, after a call that every rank refused. True if size was the reason. Raises
        InvalidArgument if it was that not all ranks call on an exchange for what they want."""
        tokens, topk = self.max_tokens, self.max_topk
        if isinstance(topk_idx, Tensor) and topk_idx.dim() == 2:
            tokens, topk = max(tokens, topk_idx.size(0)), max(topk, topk_idx.size(1))
        if isinstance(routing_map, Tensor) and routing_map.dim() == 2:
            tokens = max(tokens, routing_map.size(0))
            if routing_map.dtype == torch.bool and routing_map.numel() > 0:
                topk = max(topk, int(routing_map.sum(1).max()))
        if self._settings["on_peer_loss"] == "shrink":
            return self.grow(_roomy(tokens, self.max_tokens), min(topk, _MOST_CHOICES))
        told = self.group.gather_numbers(*wanted, tokens, topk)
        for rank, (*theirs, _, _) in enumerate(told):
            if wanted != tuple(theirs) and all(hidden for hidden, *_ in told):
                raise InvalidArgument(
                    f"(hidden size, num_experts) = {wanted} here and {tuple(theirs)} on rank "
                    f"{rank} (must be equal on all ranks)",
                    rank=self.rank,
                )
        tokens, topk = map(max, zip(*(sizes for _, _, *sizes in told)))
        topk = min(topk, _MOST_CHOICES)
        if tokens <= self.max_tokens and topk <= self.max_topk:
            return False
        self.max_tokens = _roomy(tokens, self.max_tokens)
        self.max_topk = max(self.max_topk, topk)
        if not self._settings["copy_engines"] or not self._make_copy_room():
            self._take(self._make())
        return True

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
        """Collective. Without gradients; `weft.dispatch` has them and says what goes in and out."""
        sent = (x, weights, scales, *_NOTHING_BESIDE, global_scale)

        def options(core: _core.Exchange) -> _core.Options:
            stored = _filled(_core.Options(), {"quantise": quantise})
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
        """Rows, weights, scales, experts, sources, counts."""

        def call() -> tuple[Tensor | None, ...]:
            return core.dispatch(plan, sent, experts, options(core), self._pool_of(core))

        return self._called(core, "dispatch", call)

    def _pool_of(self, core: _core.Exchange) -> tuple[int, int] | None:
        """Whose memory peers can write, so that an output's rows are not staged; None: torch's own.
        Inside a capture that is the graph's own, for its addresses must stay the graph's. By an
        outgrown exchange it is torch's, or a pool would keep that exchange."""
        if not self._on_gpu or core is not self._core or torch.cuda.is_current_stream_capturing():
            return None
        if self._pool is None:
            self._pool = OutputPool()
        return self._pool.id

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
        **choices: Any,
    ) -> tuple:
        """Collective. `plan` with topk_idx, plan_weights, routing_map, map_indices and `choices`
        (layout, pad_multiple, expert_stride, row_budget, overflow, order, balance), then `dispatch`
        by it, without gradients; `weft.plan_and_dispatch` has them.

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

        Faster than the two. Where a GPU has to tell the number of rows, everything else is ready
        by then. Where the number is given (row_budget, or expert_stride with "expert_strided"; on
        all ranks or none), routing by topk_idx, overflow "drop" and no copy engines, it is one
        launch on GPUs of one domain, in which rows travel while the plan is made, if max_tokens is
        at most 512 and max_tokens * max_topk of all ranks at most 32,768.

        receives_later: there such a call only sends, without a wait for any rank, and `receive` has
        the rest; elsewhere all is done at once. Each rank may choose for itself.
        """
        routing = (topk_idx, routing_map, plan_weights, map_indices)
        sent = (x, weights, scales, *(beside or _NOTHING_BESIDE), global_scale)
        given_rows = self._given_rows(choices)
        choices["quantise"], choices["blocks"] = quantise, blocks
        choices["scale_rule"], choices["scale_layout"] = scale_rule, scale_layout

        def options() -> _core.Options:
            return _filled(_core.Options(), choices)

        runs = (num_sms, copy_engines, receives_later)
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
    ) -> tuple[Plan, tuple[Tensor | None, ...]]:
        """Collective. `plan_and_dispatch` with blocks, by options that the core has put together
        (`_core.check_block_dispatch`); count_sums: see `Beside`. Returns the plan; and rows,
        weights, scales, None, sources and counts."""
        routing = (topk_idx, None, None, None)
        sent = (x, weights, None, None, None, count_sums, global_scale)
        given_rows = options.expert_stride * self.num_local_experts
        runs = (0, None, receives_later)
        return self._plan_and_dispatch(routing, sent, False, lambda: options, given_rows, runs)

    def _plan_and_dispatch(
        self,
        routing: tuple[Tensor | None, ...],
        sent: tuple[Tensor | None, ...],
        experts: bool,
        make_options: Callable[[], _core.Options],
        given_rows: int | None,
        runs: tuple[int, bool | None, bool],
    ) -> tuple[Plan, tuple[Tensor | None, ...]]:
        """The plan; and rows, weights, scales, experts, sources, counts. make_options: those that
        say what is sent; runs: num_sms, copy_engines, receives_later."""
        num_sms, copy_engines, receives_later = runs
        is_one_call = self._on_gpu and given_rows is not None
        is_later = is_one_call and receives_later

        def options(core: _core.Exchange) -> _core.Options:
            made = self._placed(make_options(), core, num_sms, copy_engines, is_dispatch=True)
            made.receives_later = is_later
            return made

        def call(core: _core.Exchange) -> tuple:
            pool_of = functools.partial(self._pool_of, core) if self._on_gpu else None
            how = (options(core), pool_of, given_rows, is_one_call)
            return core.plan_and_dispatch(routing, sent, experts, *how)

        verb, has_rows = "plan_and_dispatch", given_rows is not None
        core, planned = self._planned(verb, has_rows, call, routing[0], routing[1])
        made, problem, out = planned
        if problem is not None:
            raise problem
        if out is None:
            out = self._dispatched(core, made, sent, experts, options)
        if is_later and core.is_open(made):
            self._open = (made, routing, out)
        return Plan(self, made, core), out

    def receive(self, plan: Plan) -> None:
        """Local. The second half of the call with `receives_later` that made the plan or combined
        by it, on the current stream, which has to come behind the first: waits for the other ranks
        and places or sums the rows. Until then nothing of the call's results may be read. One call
        is open at a time: the next one of the exchange receives it first. Nothing is done if it is
        received already.
        """
        options = _filled(_core.Options(), {"stream": self._stream()} if self._on_gpu else {})
        plan.calls.receive(plan.core, options)
        if self._open is not None and self._open[0] is plan.core:
            self._open = None

    def is_open(self, plan: Plan) -> bool:
        """Local. Whether a call that made the plan or combined by it is still to be received."""
        return plan.calls.is_open(plan.core)

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
        """Collective. Without gradients; `weft.combine` has them and says what goes in and out.

        source_idx, int64 or int32 like source_weights [T, K]: where it is negative, the weight
        counts as zero. out: memory for the tokens, contiguous. ready: marks of rows that are still
        being written, of all ranks or none; the call waits for them, on GPUs with num_sms
        multiprocessors. blocks: rows are [El, stride, H], as of a dispatch with blocks.

        receives_later, of all ranks or none: with scale "source" on GPUs of one domain, for calls
        as short as those that `plan_and_dispatch` makes in one launch, the call only sends, without
        a wait for any rank, and `receive` has the rest; elsewhere all is done at once.
        """
        marks = ready or _NO_MARKS
        is_later = receives_later and self._on_gpu

        def call() -> Combined:
            brought = (rows, row_weights, source_weights, source_idx, marks.marks)
            options = _filled(_core.Options(), {"scale": scale, "wire": wire, "blocks": blocks})
            self._placed(options, plan.calls, num_sms, copy_engines)
            options.mark_wanted, options.mark_rows = marks.wanted, marks.block_rows
            options.receives_later = is_later
            return Combined(*plan.calls.combine(plan.core, brought, out, options))

        combined = self._called(plan.calls, "combine", call)
        if is_later and self.is_open(plan):
            self._open = (plan.core, source_weights, source_idx, combined)
        return combined

    def refuse(self, verb: str, reason: str, plan: Plan | None = None, **options: Any) -> None:
        """Collective, instead of a call that the other ranks make and this one cannot: they raise
        `reason` and name this rank, and the exchange stays usable.

        verb: "plan" or "plan_and_dispatch", with the options that the others give, or "dispatch"
        or "combine", with their plan (None: one that was made since the exchange last grew). Inside
        a capture nobody else can hear of it: raises Unsupported.
        """

        call = _raising(_Refusal(reason, rank=self.rank))
        with contextlib.suppress(_Refusal):
            if verb in ("dispatch", "combine"):
                self._called(self.core if plan is None else plan.calls, verb, call)
            else:
                has_rows = self._given_rows(options) is not None
                self._planned(verb, has_rows, call, wanted=(0, 0))

    def announce(self, verb: str, hidden: int, num_experts: int, **options: Any) -> None:
        """Collective, before a call that all ranks make on another exchange, of these sizes. If one
        refuses that call, or makes it on this exchange, all ranks raise: an announcement is as many
        calls as a refusal. verb, options: see `refuse`."""
        has_rows = self._given_rows(options) is not None
        choices = {"pad_multiple": _NOBODY_PADS_TO, "row_budget": 1 if has_rows else None}
        nothing = torch.empty((0, 1), dtype=torch.int64, device=self.device)
        rows = nothing.new_empty((0, self.hidden), dtype=torch.bfloat16)
        sent = (rows, None, None, *_NOTHING_BESIDE, None)

        def call(core: _core.Exchange) -> None:
            made = self._placed(_filled(_core.Options(), choices), core, 0, False)
            routing = (nothing, None, None, None)
            if verb == "plan" or not has_rows:
                core.plan(routing, made)
            else:
                core.plan_and_dispatch(routing, sent, False, made, None, 1, self._on_gpu)

        # Calls of an exchange follow each other, whatever streams they are on.
        settle = torch.cuda.synchronize if self._on_gpu else lambda _: None
        settle(self.device)
        core, _ = self._planned(verb, has_rows, call, wanted=(hidden, num_experts))
        settle(self.device)
        core.check()

    def _chooses_copies(self) -> bool:
        """Whether calls go by copy engines where the caller leaves it open: alike on all ranks."""
        return (
            self._on_gpu
            and overlap_settings.copies(self.hidden, self.num_ranks)
            and self.num_ranks > 1
            and not self.is_between_gpu_domains
            and not torch.cuda.is_current_stream_capturing()
        )

    def _make_copy_room(self) -> bool:
        """Collective. Another core, with room for copies; plans keep theirs. False, and calls go as
        usual, where some rank has too little memory."""
        self._has_copy_room = True  # asked for once
        self._settings["copy_engines"] = True
        try:
            self._take(self._make())
        except Error as error:
            self._settings["copy_engines"] = False
            if error.code != "out of memory":
                raise
            warnings.warn(f"no calls by copy engines: {error}", stacklevel=3)
        return self._settings["copy_engines"]

    def _placed(
        self,
        options: _core.Options,
        calls: _core.Exchange,
        num_sms: int,
        copy_engines: bool | None,
        is_dispatch: bool = False,
    ) -> _core.Options:
        """The options of a call, with how it runs, also where the caller left that open."""
        if not self._on_gpu:
            return _filled(options, {"num_sms": num_sms}) if num_sms != 0 else options
        if copy_engines is None:
            has_room = self._settings["copy_engines"] and calls is self._core
            copy_engines = num_sms == 0 and has_room and self._chooses_copies()
        num_sms = num_sms or self._settings["num_sms"]
        num_sms = num_sms or overlap_settings.sms(copy_engines and is_dispatch)
        placed = {"num_sms": num_sms, "copy_engines": copy_engines, "stream": self._stream()}
        return _filled(options, placed)

    def _stream(self) -> int:
        """The current stream as a number. torch's default stream is CUDA's legacy one, whose
        handle is 1: 0 would stand for none."""
        if not self._on_gpu:
            return 0
        return torch._C._cuda_getCurrentRawStream(self.device.index) or 1

    def check(self) -> None:
        """Raises what a call that has finished on the GPU found; on a CPU why the exchange can no
        longer be used."""
        self.core.check()


class _Refusal(InvalidArgument):
    """What `refuse` says."""


def _roomy(tokens: int, max_tokens: int) -> int:
    """Room for so many tokens where there is some for max_tokens, and for some more."""
    return max_tokens if tokens <= max_tokens else 1 << (tokens - 1).bit_length()


def _raising(error: BaseException) -> Callable[..., NoReturn]:
    def call(*_: Any) -> NoReturn:
        raise error

    return call


_MOST_CHOICES = 32  # of a token
_NOTHING_BESIDE = Beside()
_NO_MARKS = RowMarks()
_NOBODY_PADS_TO = 1_000_003  # so that no call is taken for an announcement


def _filled(record: Any, values: dict[str, Any]) -> Any:
    """`record`, a class of the core, with these attributes. Raises InvalidArgument with the name of
    one whose value is of no use."""
    for name, value in values.items():
        if name == "balance":
            value = core_balance(value)
        try:
            setattr(record, name, value)
        except (AttributeError, TypeError) as error:
            known = "is of the wrong type" if hasattr(type(record), name) else "is no option"
            raise InvalidArgument(f"{name} = {value!r} {known}") from error
    return record
