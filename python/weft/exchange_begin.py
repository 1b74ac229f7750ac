# SPDX-License-Identifier: Apache-2.0
"""How an exchange's calls begin: on all ranks, after the exchange has grown if it was too small, or
on none, and all hear the reason. exchange.py has the calls."""

import contextlib
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from weft import _core, overlap_settings, ranges
from weft.arrivals import within
from weft.errors import Error, InvalidArgument, reason_of
from weft.exchange_state import ExchangeState
from weft.group import Group
from weft.outputs import Beside, OutputPool, Plan
from weft.placement import core_balance, num_replicas
from weft.streams import LEGACY
from weft.tally import Tally


class ExchangeBegin(ExchangeState):
    """The part of `Exchange` that all of its calls have in common."""

    group: Group
    hidden: int
    num_experts: int
    gpu: int
    is_between_gpu_domains: bool
    _on_gpu: bool
    _has_copy_room: bool
    _settings: dict[str, Any]
    _pool: OutputPool | None
    _tally: Tally

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def num_ranks(self) -> int:
        return self.group.num_ranks

    @property
    def transport(self) -> str:
        """Transport between the ranks: "shm", "ofi", "peer" and so on (`weft info`)."""
        return self.core.transport

    @property
    def core(self) -> _core.Exchange:
        """The core; InvalidArgument after `close`."""
        if self._core is None:
            raise InvalidArgument("exchange: it was closed (make a new one)", rank=self.rank)
        return self._core

    def _make(self, max_tokens: int, max_topk: int) -> _core.Exchange:
        """Collective. Makes a core; a failure changes nothing."""
        sizes = {"max_tokens": max_tokens, "max_topk": max_topk}
        config = filled(_core.ExchangeConfig(), sizes | self._settings)
        with within(self._settings["timeout"]):
            core = _core.Exchange(self.group.core, config)
        self._take_sizes(core)  # a rank that comes back has those of the others
        return core

    def _take(self, core: _core.Exchange | None) -> None:
        self._tally.settle(self._core)
        if core is None:
            self._in_graphs.clear()
        elif self._core is not None and self.is_in_graphs:
            self._in_graphs.append(self._core)
        self._core, self._pool = core, None

    def refuse(self, verb: str, reason: str, plan: Plan | None = None, **options: Any) -> None:
        """Collective, instead of a call that the other ranks make and this one cannot: they raise
        `reason` and name this rank, and the exchange stays usable.

        verb: "plan" or "plan_and_dispatch", with the options that the others give, or "dispatch"
        or "combine", with their plan (None: one that was made since the exchange last grew). Inside
        a capture no other rank can hear of it: raises Unsupported.
        """

        call = _raising(_Refusal(reason, rank=self.rank))
        with contextlib.suppress(_Refusal):
            if verb in ("dispatch", "combine"):
                self._called(self.core if plan is None else plan.calls, verb, call)
            else:
                self._planned(verb, self._given_rows(options) is not None, call)

    def announce(self, verb: str, hidden: int, num_experts: int, **options: Any) -> None:
        """Collective, before a call that all ranks make on another exchange, of these sizes. If one
        refuses that call, or makes it on this exchange, all ranks raise: an announcement is as many
        calls as a refusal. verb, options: see `refuse`."""
        has_rows = self._given_rows(options) is not None
        choices = {"pad_multiple": _core.ANNOUNCEMENT, "row_budget": 1 if has_rows else None}
        nothing = torch.empty((0, 1), dtype=torch.int64, device=self.device)
        rows = nothing.new_empty((0, self.hidden), dtype=torch.bfloat16)
        sent = (rows, None, None, *Beside(), None)

        def call(core: _core.Exchange) -> None:
            made = self._placed(filled(_core.Options(), choices), core, 0, False)
            routing = (nothing, None, None, None)
            if verb == "plan" or not has_rows:
                core.plan(routing, made)
            else:
                core.plan_and_dispatch(routing, sent, False, made, None, 1, self._on_gpu)

        # Calls of an exchange follow each other, whatever streams they are on.
        settle = torch.cuda.synchronize if self._on_gpu else lambda _: None
        settle(self.device)
        try:
            core, _ = self._planned(verb, has_rows, call)
        except InvalidArgument as error:
            if "refused the call" in str(error):
                raise
            asked, here = (hidden, num_experts), (self.hidden, self.num_experts)
            raise InvalidArgument(
                f"{verb}: (hidden size, num_experts) = {asked} here, for which an exchange is "
                f"to be made, and another rank calls on the one for {here}: {error}",
                rank=self.rank,
            ) from error
        settle(self.device)
        core.check()

    def _chooses_copies(self) -> bool:
        """Returns whether calls use copy engines by default: the same on all ranks."""
        return (
            self._on_gpu
            # A new core would not know of this core's lost ranks.
            and (self._has_copy_room or self._settings["on_peer_loss"] == "fail")
            and overlap_settings.copies(self.hidden, self.num_ranks)
            and self.num_ranks > 1
            and not self.is_between_gpu_domains
            and not torch.cuda.is_current_stream_capturing()
        )

    def _make_copy_room(self, max_tokens: int, max_topk: int) -> bool:
        """Collective. Takes a new core with room for copies; plans keep theirs. Returns False, and
        keeps the old core, where some rank has too little memory."""
        settings = self._settings
        self._settings = settings | {"copy_engines": True}
        try:
            self._take(self._make(max_tokens, max_topk))
        except Error as error:
            self._settings = settings
            if error.code != "out of memory":
                raise
            settings["copy_engines"] = False
            warnings.warn(f"no calls by copy engines: {error}", stacklevel=3)
        self._has_copy_room = True  # asked for once
        return self._settings["copy_engines"]

    def _placed(
        self,
        options: _core.Options,
        calls: _core.Exchange,
        num_sms: int,
        copy_engines: bool | None,
        is_dispatch: bool = False,
    ) -> _core.Options:
        """Returns options with num_sms, copy_engines and stream of the call filled in."""
        if not self._on_gpu:
            return filled(options, {"num_sms": num_sms}) if num_sms != 0 else options
        if copy_engines is None:
            has_room = self._settings["copy_engines"] and calls is self._core
            copy_engines = num_sms == 0 and has_room and self._chooses_copies()
        num_sms = num_sms or self._settings["num_sms"]
        num_sms = num_sms or overlap_settings.sms(copy_engines and is_dispatch)
        placed = {"num_sms": num_sms, "copy_engines": copy_engines, "stream": self._stream()}
        return filled(options, placed)

    def _stream(self) -> int:
        """Returns the current stream's number."""
        if not self._on_gpu:
            return 0
        return torch._C._cuda_getCurrentRawStream(self.gpu) or LEGACY

    def _planned(
        self,
        verb: str,
        has_rows: bool,
        call: Callable[[_core.Exchange], Any],
        topk_idx: Tensor | None = None,
        routing_map: Tensor | None = None,
    ) -> tuple[_core.Exchange, Any]:
        """Collective. Returns the core and call(core), after growing it if some rank's plan needs
        more room. verb: see `refuse`. has_rows: the number of rows is given."""
        verb = verb if has_rows else "plan"
        if self._on_gpu and not self._has_copy_room and self._core:
            # All ranks are beside computation, or none.
            if self._told(self._core, verb, self._chooses_copies):
                self._make_copy_room(self.max_tokens, self.max_topk)
        while True:
            core = self.core  # one that was closed does not grow
            try:
                return core, self._called(core, verb, call, core)
            except InvalidArgument as error:
                # With a given number of rows no rank waited for a GPU, so none knows yet.
                is_unknown = self._on_gpu and has_rows
                if is_unknown or not self._grow(core, error, topk_idx, routing_map):
                    raise

    def _called(
        self, core: _core.Exchange, verb: str, call: Callable[..., Any], *given: Any
    ) -> Any:
        """Returns call(*given), traced; `call` makes a call of the core. If it fails before that,
        the other ranks hear why."""
        if not ranges.IS_ON:
            return self._told(core, verb, call, *given)
        self._told(core, verb, ranges.begin, verb, self.group, sys._getframe(1))
        try:
            return self._told(core, verb, call, *given)
        finally:
            ranges.end()

    def _told(self, core: _core.Exchange, verb: str, call: Callable[..., Any], *given: Any) -> Any:
        """Returns call(*given). Other ranks hear of its failure unless it began a call."""
        begun = _core.num_begun()
        try:
            return call(*given)
        except BaseException as error:
            if _core.num_begun() == begun:
                options = filled(_core.Options(), {"stream": self._stream()})
                core.refuse(verb, reason_of(error), options)
            raise

    def _given_rows(self, choices: dict[str, Any]) -> int | None:
        """Returns the number of rows if `choices` give it, else None (ranks wait for it). Invalid
        choices, which the call refuses, count as given (0)."""
        with contextlib.suppress(Exception):
            if choices.get("overflow", "drop") != "drop":
                return None
            if choices.get("layout") == "expert_strided":
                stride = choices.get("expert_stride", 0)
                if isinstance(stride, int) and stride > 0:
                    replicas = num_replicas(choices.get("balance", 0))
                    return stride * (self.num_local_experts + replicas)
            return choices.get("row_budget")
        return 0

    def _grow(
        self, core: _core.Exchange, error: InvalidArgument, topk_idx: Any, routing_map: Any
    ) -> bool:
        """Grows after `core` refused a plan with `error`; returns whether there is more room now.
        Collective if all ranks refused for want of room only."""
        if not core.is_outgrown():
            if "here and none, for a call with another hidden size" in str(error):
                sizes = (self.hidden, self.num_experts)
                text = f"(hidden size, num_experts) = {sizes} here, others on another rank: {error}"
                raise InvalidArgument(text, rank=self.rank) from error
            return False
        tokens, topk = self.max_tokens, self.max_topk
        if isinstance(topk_idx, Tensor) and topk_idx.dim() == 2:
            tokens, topk = max(tokens, topk_idx.size(0)), max(topk, topk_idx.size(1))
        if isinstance(routing_map, Tensor) and routing_map.dim() == 2:
            tokens = max(tokens, routing_map.size(0))
            if routing_map.dtype == torch.bool and routing_map.numel() > 0:
                topk = max(topk, int(routing_map.sum(1).max()))
        if self._settings["on_peer_loss"] != "fail":
            return self.grow(_roomy(tokens, self.max_tokens), min(topk, _MOST_CHOICES))
        with within(self._settings["timeout"]):
            tokens, topk = map(max, zip(*self.group.gather_numbers(tokens, topk)))
        sizes = _roomy(tokens, self.max_tokens), max(self.max_topk, min(topk, _MOST_CHOICES))
        if sizes == (self.max_tokens, self.max_topk):
            return False
        if not self._settings["copy_engines"] or not self._make_copy_room(*sizes):
            self._take(self._make(*sizes))
        return True

    def _pool_of(self, core: _core.Exchange) -> tuple[int, int] | None:
        """Returns the id of the pool for outputs, in memory that peers can write, so that rows are
        not staged; None: torch's allocator. None inside a capture, as the graph's addresses must
        stay its own, and for an outgrown exchange, which a pool would keep alive."""
        if not self._on_gpu or core is not self._core or torch.cuda.is_current_stream_capturing():
            return None
        # Between domains those that are left reach no memory of before.
        may_change = self.is_between_gpu_domains and self._settings["on_peer_loss"] != "fail"
        epoch = core.report()[0] if may_change else 0
        if self._pool is None or self._pool.epoch != epoch:
            self._pool = OutputPool(self.device, epoch)
        return self._pool.id


class _Refusal(InvalidArgument):
    """Error by which `refuse` ends its own call."""


def _roomy(tokens: int, max_tokens: int) -> int:
    """Returns max_tokens if it suffices, else tokens rounded up to a power of two."""
    return max_tokens if tokens <= max_tokens else 1 << (tokens - 1).bit_length()


def _raising(error: BaseException) -> Callable[..., NoReturn]:
    def call(*_: Any) -> NoReturn:
        raise error

    return call


_MOST_CHOICES = 32  # of a token


def filled(record: Any, values: dict[str, Any]) -> Any:
    """Returns `record`, of a class of the core, with `values` as attributes. Raises InvalidArgument
    that names an unusable one."""
    for name, value in values.items():
        if name == "balance":
            value = core_balance(value)
        try:
            setattr(record, name, value)
        except (AttributeError, TypeError) as error:
            raise InvalidArgument(f"{name} = {value!r} {_misfit(record, name, value)}") from error
    return record


def _misfit(record: Any, name: str, value: Any) -> str:
    """Tells why attribute `name` does not take the value."""
    known = getattr(type(record), name, None)
    if known is None:
        return "is no option"
    expected = re.search(r"arg: (.+), /\)", known.fset.__doc__ or "")
    kind = type(value).__name__
    if expected is None or expected[1] == kind:
        return "is out of range"
    return f"is a {kind} (expected {expected[1]})"
