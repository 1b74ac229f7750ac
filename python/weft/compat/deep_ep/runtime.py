# SPDX-License-Identifier: Apache-2.0
"""Runtime of a buffer: the ranks, their exchanges and a communication stream; and `Call`, which
tells all ranks what one refuses."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft import (
    CallReport,
    Error,
    Exchange,
    Group,
    InvalidArgument,
    Plan,
    Unsupported,
    _core,
    ranges,
)
from weft.arrivals import TIMEOUT as TIMEOUT
from weft.arrivals import within
from weft.errors import BadCall, RanksLost, reason_of
from weft.run.calls import count
from weft.streams import CommStream

from .checks import MAX_TOPK, check
from .layout import Hosts
from .steps import Steps

MIN_TOKENS, MIN_TOPK = 4096, 8  # initial room of an exchange


def timeout_of(seconds: float | None = None, usual: float = TIMEOUT) -> float:
    """Returns the seconds of every wait: the caller's `seconds`; for None, or `usual`, the
    interface's default: WEFT_CALL_TIMEOUT_S, else `usual`."""
    return _core.call_timeout(usual) if seconds in (None, usual) else float(seconds)


Key = tuple[int, int, torch.device]  # of an exchange: hidden size, number of experts, device
# A key, whether calls go on without lost ranks, and whether they have few tokens.
_Kind = tuple[int, int, torch.device, bool, bool]


class ExchangePool:
    """One exchange for each hidden size, number of experts and device, of one group.

    Low-latency calls have an exchange of their own, with room for few tokens only, which takes
    fewer launches; one buffer may serve both kinds in turn. All ranks ask in the same order. A plan
    keeps its exchange, so an exchange that is replaced by a larger one serves its plans to the end.
    An exchange whose calls a CUDA graph holds lives until `close`.
    """

    def __init__(
        self,
        group: Group,
        timeout: float | None = None,
        on_loss: Callable[[Iterable[int]], None] | None = None,
        meet: Callable[[float], Group | None] | None = None,
    ) -> None:
        """timeout: as for `timeout_of`. meet(seconds): called, collectively, at the first
        low-latency call that goes on without lost ranks, if no call was before; returns the group
        of the ranks that come in time, None if all do. on_loss: called with lost ranks on all that
        are left, and exchanges go on without them: among CPUs at the end of the call that has lost
        them, among GPUs of one host, for calls `with_masks` only, as `Steps` explains."""
        self.group = group
        self.last: Exchange | None = None  # of the last call
        # The exchange of the last `Call` that plans, by its with_masks.
        self.planned: dict[bool, Exchange] = {}
        self.lost: tuple[int, ...] = ()  # the same on all ranks that are left
        self.lost_on_gpus: tuple[int, ...] = ()  # of these
        self._on_loss = on_loss
        self._meet = meet
        self._is_part = False  # some ranks were absent
        self._timeout = timeout_of(timeout)
        self._exchanges: dict[_Kind, Exchange] = {}
        self._in_graphs: list[Exchange] = []  # replaced by larger ones
        self._agreed: set[int] = set()  # most tokens that all ranks were asked about
        self._lock = threading.Lock()  # forward and backward run on different threads

    def get(
        self,
        key: Key,
        max_tokens: int,
        max_topk: int | Callable[[], int],
        verb: str,
        options: dict[str, Any],
        most: int | None = None,
        with_masks: bool = False,
    ) -> Exchange:
        """Returns the exchange for a call. Collective when one must be made: at a key's first call,
        or when one is too small. A rank that refuses the call then, or makes it on the exchange
        used last, makes all raise. verb, options: of the call, as for `Exchange.refuse`.

        most: the caller's num_max_tokens_per_rank. Its first call is collective, too, except in a
        capture; BadCall on all ranks if theirs differ.

        with_masks: for a low-latency call, for which lost ranks are no error.

        max_tokens and a number for max_topk are the same on all ranks. A function for max_topk may
        return another number on each rank; it is called at the first call only, and an exchange
        grows by itself later.
        """
        if self._is_part and not with_masks:
            raise Unsupported(
                "normal calls need all ranks, and some did not come to the first low-latency call",
                "unsupported",
                self.group.rank,
            )
        goes_on = self.can_lose(key[2], with_masks)
        kind = (*key, goes_on, self._is_apart(key[2], goes_on, with_masks))
        old = self._exchanges.get(kind)  # mostly one that is enough: that needs no lock
        is_known = most is None or most in self._agreed or self._is_capturing(key)
        if old is not None and old.max_tokens >= max_tokens and is_known:
            if callable(max_topk) or old.max_topk >= max_topk:
                return old
        hidden, num_experts, device = key
        with self._lock, within(self._timeout):
            old = self._exchanges.get(kind)
            if old is not None and callable(max_topk):
                max_topk = old.max_topk
            is_enough = old is not None and old.max_tokens >= max_tokens
            is_enough = is_enough and old.max_topk >= min(max_topk, MAX_TOPK)
            if is_enough and is_known:
                return old
            if self.last is not None:
                with contextlib.suppress(RanksLost):  # it has heard of them
                    self.last.announce(verb, hidden, num_experts, **options)
            if most is not None:
                self._agree(most)
            if is_enough:
                return old
            if old is not None and goes_on and device.type == "cpu":
                old.grow(max_tokens, min(max_topk, MAX_TOPK))
                return old
            if self.lost:
                raise Unsupported(
                    f"no exchange for (hidden size, num_experts) = {(hidden, num_experts)} is "
                    f"there, and none can be made: ranks {list(self.lost)} are lost",
                    "unsupported",
                    self.group.rank,
                )
            if callable(max_topk):
                (max_topk,) = max(
                    self.group.gather_numbers(self.group.agreed("exchange", max_topk))
                )
            topk = min(max(max_topk, 1), MAX_TOPK)  # a plan refuses more, saying how many
            steps = Steps()
            new = Exchange(
                self.group,
                hidden=hidden,
                num_experts=num_experts,
                device=device,
                max_tokens=max(max_tokens, old.max_tokens if old else 1),
                max_topk=max(topk, old.max_topk if old else 1),
                timeout=self._timeout,
                **(self._loss_options(device, steps) if goes_on else {}),
            )
            if old is not None and old.is_in_graphs:
                self._in_graphs.append(old)
            self._exchanges[kind] = new
            steps.are_of(new)
            return new

    @staticmethod
    def _is_apart(device: torch.device, goes_on: bool, with_masks: bool) -> bool:
        """Returns whether a call uses the low-latency exchange. CPU calls that go on without lost
        ranks do not: after a loss no other exchange can be made."""
        return with_masks and not (goes_on and device.type == "cpu")

    @staticmethod
    def _is_capturing(key: Key) -> bool:
        """Returns whether a capture runs, in which no rank can be asked."""
        return key[2].type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _agree(self, most: int) -> None:
        """Collective. BadCall on all ranks unless `most` is equal."""
        if self.last is None:  # a rank that refuses the call is heard here
            self.group.agreed("exchange", lambda: None)
        for rank, (theirs,) in enumerate(self.group.gather_numbers(most)):
            check(
                theirs == most,
                f"num_max_tokens_per_rank = {most} here and {theirs} on rank {rank} "
                "(must be equal on all ranks)",
            )
        self._agreed.add(most)

    def likely(self, x: Any, num_experts: Any, room: Any, with_masks: bool) -> Exchange | None:
        """Returns the exchange on which others make a call that this rank refuses, by arguments of
        which any may be wrong: rows x [T, H], the number of experts, tokens to have room for, and
        whether it is a low-latency call. If these sizes have none yet, returns the last exchange;
        without sizes, the last of the call's kind."""
        row = x[0] if isinstance(x, tuple) and x else x
        hidden = row.size(1) if isinstance(row, Tensor) and row.dim() == 2 else None
        if hidden is None and num_experts is None:
            return self.planned.get(with_masks, self.last)
        for (*sizes, device, goes_on, is_apart), exchange in self._exchanges.items():
            is_kind = is_apart == self._is_apart(device, goes_on, with_masks)
            has_room = not isinstance(room, int) or exchange.max_tokens >= room
            if is_kind and has_room and sizes == [hidden, num_experts]:
                return exchange
        return self.last

    def meet(self, device: torch.device) -> None:
        """Connects ranks, collectively at the device's first low-latency call; PeerError if this
        rank is too late."""
        meet = self._meet
        if meet is None or not self.can_lose(device) or self._is_capturing((0, 0, device)):
            return
        self._meet = None
        part = meet(self._timeout) if self.last is None else None
        if part is not None:
            self.group, self._is_part = part, True

    def can_lose(self, device: torch.device, with_masks: bool = True) -> bool:
        """Returns whether calls on that device go on without lost ranks."""
        return self._on_loss is not None and (with_masks or device.type == "cpu")

    def is_in_step(self, exchange: Exchange, plan: Plan | None = None) -> bool:
        """Returns whether a call on GPUs, by `plan` if given, goes on without lost ranks and needs
        no catching up."""
        steps = Steps.of(exchange)
        is_it = steps.behind == 0 and exchange in self.going_on_gpus()
        return is_it and (plan is None or steps.has(plan))

    def going_on_gpus(self) -> list[Exchange]:
        """Exchanges on GPUs that go on without lost ranks; none inside of a capture."""
        found = [exchange for exchange in self._going_on() if exchange.gpu >= 0]
        return [] if found and torch.cuda.is_current_stream_capturing() else found

    def _going_on(self) -> list[Exchange]:
        """Lists exchanges that outlive lost ranks, alike on all."""
        return [exchange for kind, exchange in self._exchanges.items() if kind[3]]

    def _loss_options(self, device: torch.device, steps: Steps) -> dict[str, Any]:
        """Returns the options of an exchange on that device that goes on without lost ranks."""
        is_on_gpu = device.type == "cuda"
        kept = weakref.WeakMethod(self._hear)  # no cycle may keep the pool alive

        def hear(report: CallReport) -> None:
            if is_on_gpu:
                steps.hear(report)
            here = kept()
            if here is not None:
                here(report, is_on_gpu)

        return {"on_peer_loss": "repeat", "on_loss": hear}

    def _hear(self, report: CallReport, is_on_gpu: bool) -> None:
        self.lost = tuple(sorted({*self.lost, *report.lost}))
        if is_on_gpu:  # there each exchange hears by itself
            self.lost_on_gpus = self.lost
        else:
            self.mask(report.lost)
        self._on_loss(report.lost)

    @property
    def loses_ranks(self) -> bool:
        """True if there is an exchange that goes on without ranks that are lost."""
        return bool(self._going_on())

    def mask(self, ranks: Iterable[int]) -> bool:
        """Local. Exchanges that go on without lost ranks leave out `ranks`, too, from their next
        call on. Returns False if there is none."""
        given, going_on = list(ranks), self._going_on()
        for exchange in going_on:
            is_given = False
            while not is_given:
                with contextlib.suppress(RanksLost):  # others, of whom it has heard now
                    exchange.mask(given)
                    is_given = True
        return bool(going_on)

    def refuse(
        self,
        exchange: Exchange | None,
        verb: str,
        reason: str,
        plan: Plan | None,
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        """Refuses, collectively, the others' call on `exchange`, or with None on the first that
        they make. See `Exchange.refuse`. device: of a low-latency call."""
        if exchange is not None:
            exchange.refuse(verb, reason, plan, **options)
            return
        if device is not None:
            self.meet(device)

        def fail() -> None:
            raise InvalidArgument(reason)

        with contextlib.suppress(InvalidArgument):
            self.group.agreed("exchange", fail)

    def close(self) -> None:
        """Closes all exchanges; the next call makes new ones."""
        with self._lock:
            for exchange in self._exchanges.values():
                exchange.close()
            self._exchanges.clear()
            for exchange in self._in_graphs:
                exchange.close()
            self._in_graphs.clear()
            self.last = None
            self.planned.clear()

    def footprint(self) -> dict[str, int]:
        """Returns the sums of all exchanges' `Exchange.footprint`."""
        with self._lock:
            held = [*self._exchanges.values(), *self._in_graphs]
            found = [exchange.footprint() for exchange in held]
        return {name: sum(one[name] for one in found) for name in found[0]} if found else {}


class Call:
    """A call under another library's name, which begins the message of a refusal within.

    Until an exchange begins its own call, a failure here makes the other ranks raise too, and not
    wait. They hear the reason on the call's exchange, or while that is unknown on the exchange that
    the buffer used last; `is_for` finds a likelier one of several.
    """

    __slots__ = ("_begun", "_device", "_name", "_pool", "_verb", "exchange", "options", "plan")

    def __init__(
        self,
        name: str,
        pool: ExchangePool | None = None,
        verb: str = "plan_and_dispatch",
        since: int | None = None,
        **options: Any,
    ) -> None:
        """verb, options: the exchange's call that all ranks make, as for `Exchange.refuse`. Without
        a pool the call is local. since: `_core.num_told` at the begin, if that was before."""
        self._name, self._pool = name, pool
        self._verb = None if pool is None else verb
        self._device: torch.device | None = None  # of a low-latency call
        self._begun = _core.num_told() if since is None else since
        self.exchange: Exchange | None = None if pool is None else pool.last
        self.plan: Plan | None = None
        self.options = options

    def is_for(self, x: Any, num_experts: Any, room: Any = 0, with_masks: bool = False) -> None:
        """Finds the exchange by the call's unchecked arguments; see `ExchangePool.likely`."""
        if self._pool is not None:
            self.exchange = self._pool.likely(x, num_experts, room, with_masks)
            row = x[0] if isinstance(x, tuple) and x else x
            self._device = row.device if with_masks and isinstance(row, Tensor) else None

    def meet(self, device: torch.device) -> None:
        """Calls `ExchangePool.meet`; a late rank tells no others."""
        verb, self._verb = self._verb, None
        self._pool.meet(device)
        self._verb, self._begun = verb, _core.num_told()

    def by(self, plan: Plan, then: str | None = None) -> Plan:
        """Says that ranks call by their plans; then: the exchange's next call, if another."""
        self.exchange, self.plan = plan.exchange, plan
        if then is not None:
            self._verb, self._begun = then, _core.num_told()
        return plan

    def plans(
        self,
        key: Key,
        max_tokens: int,
        max_topk: int,
        most: int | None = None,
        with_masks: bool = False,
        **options: Any,
    ) -> Exchange:
        """Says that all ranks plan so on the exchange of `ExchangePool.get`, and returns it."""
        verb, self._verb = self._verb, None  # if none can be made, all ranks refuse
        self.exchange = self._pool.get(key, max_tokens, max_topk, verb, options, most, with_masks)
        self._pool.planned[with_masks] = self.exchange
        self._verb, self._begun, self.options = verb, _core.num_told(), options
        return self.exchange

    def __enter__(self) -> Call:
        count(self._name)
        if ranges.IS_ON:
            ranges.begin(self._name, None if self._pool is None else self._pool.group)
        return self

    def __exit__(self, _kind: Any, problem: BaseException | None, _trace: Any) -> None:
        try:
            if problem is None:
                if self._pool is not None:
                    self._pool.last = self.exchange
                return
            reason = f"{self._name}: {reason_of(problem)}"
            if self._verb is not None and _core.num_told() == self._begun:
                try:
                    told = (self.exchange, self._verb, reason, self.plan, self._device)
                    self._pool.refuse(*told, **self.options)
                except Error as error:  # inside a capture: it says so
                    raise BadCall(str(error)) from problem
            if isinstance(problem, BadCall):
                raise BadCall(reason) from problem
            if isinstance(problem, InvalidArgument):  # of another rank: the same kind on all
                text = self._meant(str(problem)) + str(problem)
                raise BadCall(text, rank=problem.rank) from problem
        finally:
            if ranges.IS_ON:
                ranges.end()  # a refusal, too, may wait for other ranks

    def _meant(self, text: str) -> str:
        """Returns a prefix with the caller's names for the arguments in an error's text."""
        unequal = re.search(r"(?:^|: )([^:=]+) = .*must be equal on all ranks", text)
        names = unequal and _MEANT.get(self._name, {}).get(unequal[1].split(" in the same")[0])
        return f"{self._name}: {names}: " if names else ""


# Names, by call, of what must be equal on all ranks and has another name in an exchange.
_LL_MOST = "num_max_dispatch_tokens_per_rank"
_EXPERTS = "num_of_experts or num_of_experts_per_rank"
_SIZES = "(hidden size, num_experts)"  # one rank announces another exchange, or one with more room
_HYBRID = {"num_experts": _EXPERTS, _SIZES: f"hidden, {_EXPERTS} or num_max_tokens_per_rank"}
_MEANT = {
    "low_latency_dispatch": {
        "quantise": "use_fp8, use_nvfp4 or use_mxfp8",
        "scale_rule": "round_scale or use_ue8m0",
        "max_tokens": _LL_MOST,
        "expert_stride": _LL_MOST,
        _SIZES: f"the width of x, num_experts or {_LL_MOST}",
    },
    "low_latency_combine": {"wire": "use_logfmt"},
    "dispatch": {"layout": "do_expand or num_max_tokens_per_rank", **_HYBRID},
    "dispatch_with_permute": {"overflow": "non_blocking", **_HYBRID},
}


def found_at_once(
    error: BaseException,
    told: int,
    name: str,
    pool: ExchangePool | None,
    verb: str = "plan_and_dispatch",
    by: Any = None,
    **options: Any,
) -> None:
    """Raises the error of an at-once call, begun when `_core.num_told` was `told`, if other ranks
    know of the call, or must hear of an interrupt; else nothing has begun, and the caller goes on
    in steps. name, verb, options: as for `Call`. by: the call's handle, or its exchange, None if
    unknown."""
    if isinstance(error, Exception) and _core.num_told() == told:
        return
    with Call(name, pool, verb, told, **options) as call:
        plan = getattr(by, "plan", None)
        if isinstance(by, Exchange):
            call.exchange = by
        elif isinstance(plan, Plan):
            call.by(plan)
        raise error


class NoGradients:
    """A `torch.no_grad` that is a few microseconds faster."""

    __slots__ = ("_was_on",)

    def __enter__(self) -> None:
        self._was_on = torch.is_grad_enabled()
        if self._was_on:
            torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        if self._was_on:
            torch._C._set_grad_enabled(True)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def without_gradients(function: _Function) -> _Function:
    """Wraps `function` in `NoGradients`, cheaply if gradients are off."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **options)
        with NoGradients():
            return function(*args, **options)

    return call


class Runtime:
    """State of a `Buffer`, from its constructor to `destroy`."""

    def __init__(
        self,
        group: Group,
        timeout: float | None = None,
        on_loss: Callable[[Iterable[int]], None] | None = None,
        meet: Callable[[float], Group | None] | None = None,
    ) -> None:
        """Takes what `ExchangePool` takes."""
        self.group = group
        self.hosts = Hosts(group.domains, group.rank)
        self.exchanges = ExchangePool(group, timeout, on_loss, meet)
        self.stream = CommStream()

    def is_available(self) -> bool:
        return True

    def get_num_rdma_ranks(self) -> int:
        """Counts hosts as the interface does: domains, of at most 8 ranks each."""
        return self.hosts.num_hosts

    def get_rdma_rank(self) -> int:
        """Returns this rank's host."""
        return self.hosts.here

    def is_internode_available(self) -> bool:
        """Returns whether the ranks are on several hosts."""
        return self.hosts.are_several

    def get_local_device_id(self) -> int:
        return torch.cuda.current_device() if torch.cuda.is_available() else -1


class MpiGroup(Group):
    """The ranks of an mpi4py communicator."""

    ranks: tuple[int, ...] = ()

    def __init__(self, comm: Any, ranks: tuple[int, ...] | None = None) -> None:
        """Collective. ranks: the ranks' numbers if not 0, 1, 2 and so on."""
        self._process_group = lambda: None
        self.ranks = ranks or tuple(range(comm.Get_size()))
        self.core = _core.Group.from_all_gather(comm.Get_rank(), comm.Get_size(), comm.allgather)
