# SPDX-License-Identifier: Apache-2.0
"""Replicas of popular experts: weights go to them before a layer computes, gradients come back.

    balance = weft.Balance(exchange, replicas=2, shapes=[(H, F), (F, H)])  # for all layers
    out = balance.apply(placement, experts, rows, w1, w2)  # experts(rows, *weights) with replicas

A rank has its own experts, the masters, and places for R replicas, which may stay empty. Of a
*placement*, int32 [ranks, R], an entry is the expert in that place, or -1; it is the same on all
ranks. copies.py moves what has to move."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from weft import _core, copies
from weft import relays as relaying
from weft.block_products import PlacedWeight
from weft.errors import InvalidArgument, RanksLost
from weft.exchange import Exchange
from weft.group import Group
from weft.lending import IN_BACKWARD, Enter, Later, Leave
from weft.outputs import Plan

_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
_SUMMED = "expected float32, bfloat16 or float16"
_ITEM = 4  # bytes of the widest of them
_BETWEEN = "|"  # the parts of an invitation


class Balance:
    """One rank's places for replicas, shared by all layers of these shapes; they hold the weights
    of the last call.

    Collective. exchange: whose ranks, experts (El of each rank) and device it is for. replicas: R,
    the same on all ranks. shapes: of each tensor of an expert's weights, without the experts.
    dtypes: of all of them, or one for each; any, FP8 and scales included. copy_engines: on GPUs
    these carry what moves. timeout: as of `Exchange`. on_peer_loss: "fail", or "shrink" as of
    an `Exchange`: replicas of a lost rank's experts are then zeros, and gradients are those of the
    ranks that are left; not with wgrad "blocks". On GPUs a call, or `check`, raises RanksLost when
    ranks are lost, as those of the exchange do, and the step is made again. relays: whether ranks
    that have got an expert pass it on: "never", "always" (not with "shrink"), or "auto", where that
    should take less time (relays.py); replicas get the same bits. invitation: of
    `Balance.invitation`, in a new process that takes a lost rank's place; it gives what the others
    gave, or raises InvalidArgument alone, and waits for their `readmit`. Raises InvalidArgument
    on every rank if one rank's arguments are wrong or differ. Calls are collective, and raise
    InvalidArgument on every rank if one rank's are wrong, TimeoutError, PeerError.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        replicas: int,
        shapes: Sequence[Sequence[int]],
        dtypes: torch.dtype | Sequence[torch.dtype] = torch.bfloat16,
        copy_engines: bool = False,
        timeout: float | None = None,
        on_peer_loss: str = "fail",
        relays: str = "auto",
        invitation: str | None = None,
    ) -> None:
        self.group = exchange.group
        self._on_peer_loss = on_peer_loss

        def checked() -> list[tuple[tuple[int, ...], torch.dtype]]:
            _check_relays(relays, on_peer_loss)
            return _kinds(replicas, shapes, dtypes)

        kinds = self.group.agreed("Balance", checked)
        self._sizes = repr((replicas, kinds, relays))
        if invitation is None:
            self._agree()
        else:
            invitation = self._accepted(invitation)
        self.replicas = replicas
        self.num_local_experts = exchange.num_local_experts
        self.device = exchange.device
        num_places = self.num_local_experts + replicas
        # Masters, then replicas: what `apply` lends.
        self._places = tuple(_zeros(num_places, *kind, self.device) for kind in kinds)
        self._elements = sum(math.prod(shape) for shape, _ in kinds)
        self._replicas: Held | None = None  # whose replicas are there
        self._masters: Held | None = None  # whose masters are there
        self._ahead: Held | None = None  # whose replicas `push_weights` put there
        self._num_left_out = 0  # calls since the last exchange of rows that needed none
        self._is_exchanging = False
        self._num_readmitted = 0  # times
        self._copy_engines = copy_engines or None  # None: where Weft chooses them
        # Replicas get nothing from a relay that is lost, though their master may be left.
        self._relays = "never" if on_peer_loss == "shrink" else relays
        domain_of = {rank: at for at, ranks in enumerate(self.group.domains) for rank in ranks}
        self._domain_of = [domain_of[rank] for rank in range(self.group.num_ranks)]
        self._carrier: Exchange | None = None
        if replicas > 0:
            group = self.group
            if invitation:
                group = Group.rejoin(exchange.rank, invitation)
            self._carrier = self._make_carrier(group, copy_engines, timeout)

    def _agree(self) -> None:
        told = self.group.all_gather(self._sizes.encode())
        for rank, theirs in enumerate(told):
            self._check_sizes(theirs.decode(), f"on rank {rank}")

    def _accepted(self, invitation: str) -> str:
        """Returns the carrier's part of the invitation, once its sizes are checked."""
        sizes, _, rest = invitation.partition(_BETWEEN)
        self._check_sizes(sizes, "in the invitation")
        return rest

    def _check_sizes(self, theirs: str, where: str) -> None:
        if theirs != self._sizes:
            raise InvalidArgument(
                f"Balance: (replicas, [shape, dtype], relays) = {self._sizes} here and {theirs} "
                f"{where} (must be equal on all ranks)",
                rank=self.group.rank,
            )

    def _make_carrier(self, group: Group, copy_engines: bool, timeout: float | None) -> Exchange:
        """Makes an exchange with room for the group's replicas from one rank, and gradients."""
        num_ranks = group.num_ranks
        tag = copies.TAG_BYTES
        row, each = copies.rows_of(tag + sum(copies.bytes_of(one).size(1) for one in self._places))
        row_back, each_back = copies.rows_of(tag + _ITEM * self._elements)
        return Exchange(
            group,
            hidden=max(row, row_back),
            num_experts=num_ranks,
            max_tokens=self.replicas * max(num_ranks * each, each_back),
            max_topk=1,
            device=self.device,
            copy_engines=copy_engines,
            timeout=timeout,
            on_peer_loss=self._on_peer_loss,
        )

    @property
    def num_places(self) -> int:
        """Places: El + R."""
        return self.num_local_experts + self.replicas

    @property
    def replica_bytes(self) -> int:
        """Bytes that a replica moves in a step of training: weights before the forward and again
        before the backward, and gradients in fp32."""
        weights = sum(copies.bytes_of(one).size(1) for one in self._places)
        return 2 * weights + _ITEM * self._elements

    def push_weights(
        self, plan_or_placement: Plan | Tensor, weights: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Collective. Copies experts' weights [El, ...], of the balance's shapes and dtypes, bit by
        bit to the ranks that have replicas of them.

        Returns the replicas' [R, ...], valid until the next call; an empty place is as it was.
        A following `apply` with the same placement and the same memory, unchanged as far as torch
        knows, does not push again: so weights may travel on a stream of their own while tokens are
        dispatched. Ranks that differ in this raise InvalidArgument.
        """
        with self._refusing("push_weights"):
            held = self._hold_of(plan_or_placement, weights)
            self._push(held, "push_weights")
        self._ahead = held
        return tuple(one[self.num_local_experts :] for one in self._places)

    def reduce_grads(self, plan_or_placement: Plan | Tensor, grads: Sequence[Tensor]) -> None:
        """Collective. Adds replicas' gradients to their masters', in place: the master's, then by
        ascending rank; in fp32, rounded once.

        grads: [El + R, ...] each, fp32, bf16 or fp16, contiguous, of masters and then of replicas;
        together at most as many elements per expert as the weights. Replicas' gradients stay.
        """
        with self._refusing("reduce_grads"):
            placement = self._placement_of(plan_or_placement)
            self._check_gradients(grads)
            local = self.num_local_experts
            own, slots = [one[:local] for one in grads], [one[local:] for one in grads]
            self._reduce(placement, own, slots, "reduce_grads")

    def apply(
        self,
        plan_or_placement: Plan | Tensor,
        experts: Callable[..., Tensor | tuple[Tensor, ...]],
        rows: Tensor,
        *weights: Tensor,
        wgrad: str = "places",
        queue: Any = None,
    ) -> Any:
        """Collective, and so is its backward. Returns experts(rows, *weights), with weights
        [El + R, ...] of masters and then of replicas; differentiable.

        Replicas get their weights before `experts`, and again before its backward, as another layer
        may have had the places since. After the backward of `experts`, and before that of what made
        `rows`, replicas' gradients are added to the masters', as `reduce_grads` does: weights
        [El, ...] get gradients, and no caller sees the replicas'. `experts` may keep its
        weights for backward, but for nothing else.

        wgrad "blocks", of all ranks or none: weights come as `PlacedWeight`, for one `block_linear`
        each. Their gradient is then the sum over blocks of rows, from the first replica's first to
        the master's last; bit for bit that of `block_linear` without replicas, if these have whole
        blocks.

        queue: a `weft.overlap.wgrad.WeightGradientQueue` to which the backward of `experts` leaves
        the gradients of the weights that it gets. `queue.run()` then also brings those of replicas
        to their masters, and is collective; the masters are parameters.
        """
        rows, lent, loan = self.lend(plan_or_placement, rows, *weights, wgrad=wgrad, queue=queue)
        out = experts(rows, *lent)
        if isinstance(out, Tensor):
            return self.take_back(loan, out)[0]
        return self.take_back(loan, *out)

    def lend(
        self,
        plan_or_placement: Plan | Tensor,
        rows: Tensor,
        *weights: Tensor,
        wgrad: str = "places",
        queue: Any = None,
    ) -> tuple[Tensor, list[Any], Held]:
        """Collective. Does the first half of `apply`, for experts that are no function: returns
        rows, the weights of all places, and the loan for `take_back` of the experts' results.
        """
        with self._refusing("apply"):
            held = self._hold_of(plan_or_placement, weights)
            _check_wgrad(wgrad, queue, weights)
            if wgrad == "blocks" and self._on_peer_loss == "shrink":
                raise InvalidArgument('wgrad = "blocks" needs all ranks (on_peer_loss = "fail")')
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.is_same(held):
            held = ahead
        later: Later | None = None if wgrad == "places" and queue is None else Later(queue)
        rows, *lent = Enter.apply(self, held, later, rows, *weights)
        return rows, lent if later is None else later.given(lent, weights), held

    def take_back(self, loan: Held, *made: Tensor) -> tuple[Tensor, ...]:
        """Ends an `apply`: returns the experts' results, whose backward is collective."""
        return Leave.apply(self, loan, *made)

    def invitation(self) -> str:
        """Returns the text by which a new process makes its `Balance` in the place of a lost rank,
        once the exchange has that rank again. Raises Unsupported without on_peer_loss="shrink"."""
        carriers = "" if self._carrier is None else self._carrier.invitation()
        return self._sizes + _BETWEEN + carriers

    def check(self) -> None:
        """Raises the error that queued work found on the GPU, as `Exchange.check` does."""
        if self._carrier is not None:
            with self._hearing_of_losses():
                self._carrier.check()

    def readmit(self, ranks: Iterable[int]) -> None:
        """Takes lost ranks in again, like `Exchange.readmit`; all ranks that are left call it
        between the same two calls. Nothing counts as pushed then, and the backward of an earlier
        `apply` raises InvalidArgument."""
        self._forget()
        self._num_readmitted += 1
        if self._carrier is not None:
            # The carrier may not know yet that they are lost: a call finds out. On GPUs a rank that
            # hears of it by RanksLost makes one more, for which the others wait.
            is_known = False
            while not is_known:
                with contextlib.suppress(RanksLost):
                    self._carrier.plan(torch.empty((0, 1), dtype=torch.int32, device=self.device))
                    is_known = True
            self._carrier.readmit(ranks)

    # --- what the calls are made of ---

    def _announce(self, exchange: Exchange) -> None:
        """Collective, before another `Balance` is made for that exchange: if a rank makes a call of
        this one instead, all ranks raise InvalidArgument."""
        if self._carrier is not None:
            sizes = (exchange.hidden, exchange.num_experts)
            self._carrier.announce("plan_and_dispatch", *sizes, row_budget=0)

    @contextlib.contextmanager
    def _refusing(self, name: str) -> Iterator[None]:
        """Tells a failure within, unless an exchange of rows raised it, to the ranks that come to
        the next exchange, which forget their replicas too."""
        self._is_exchanging = False
        try:
            yield
        except BaseException as error:
            self._forget()
            if self._is_exchanging:
                raise
            problem = f"{name}: {error}"
            if self._carrier is not None:
                self._carrier.refuse("plan_and_dispatch", problem, row_budget=0)
            if isinstance(error, Exception) and not isinstance(error, torch.OutOfMemoryError):
                raise InvalidArgument(problem, rank=self.group.rank) from error
            raise

    def _forget(self) -> None:
        """Forgets what is loaded, on all ranks, so that all make the same exchanges."""
        self._replicas = self._masters = self._ahead = None
        self._num_left_out = 0

    def _placement_of(self, given: Plan | Tensor) -> Tensor:
        placement = given if isinstance(given, Tensor) else getattr(given, "placement", None)
        num_ranks = self.group.num_ranks
        if not isinstance(placement, Tensor):
            raise InvalidArgument(f"{type(given).__name__} has no placement (expected a tensor)")
        shape = [num_ranks, self.replicas]
        if self.replicas == 0 and placement.numel() == 0:  # a plan without replicas has that
            return torch.empty(shape, dtype=torch.int32, device="cpu")
        if placement.dtype != torch.int32 or list(placement.shape) != shape:
            raise InvalidArgument(
                f"placement is {placement.dtype} {list(placement.shape)} (expected int32 {shape}: "
                "ranks, replicas)"
            )
        problem = copies.unknown_expert(placement, self.num_local_experts)
        if problem is not None:
            raise InvalidArgument(f"placement{problem}")
        return placement

    def _hold_of(self, given: Plan | Tensor, weights: Sequence[Tensor]) -> Held:
        placement = self._placement_of(given)
        if len(weights) != len(self._places):
            raise InvalidArgument(f"{len(weights)} weights (expected {len(self._places)})")
        for at, (one, place) in enumerate(zip(weights, self._places)):
            wanted = [self.num_local_experts, *place.shape[1:]]
            _check(f"weights[{at}]", one, self.device, place.dtype, wanted)
        return Held(placement, weights, self._num_readmitted)

    def _check_gradients(self, grads: Sequence[Tensor]) -> None:
        elements = 0
        for at, one in enumerate(grads):
            tail = list(one.shape[1:]) if isinstance(one, Tensor) else []
            wanted = one.dtype if getattr(one, "dtype", None) in _GRADIENTS else torch.float32
            _check(f"grads[{at}]", one, self.device, wanted, [self.num_places, *tail])
            if not one.is_contiguous():
                raise InvalidArgument(f"grads[{at}] is not contiguous")
            elements += math.prod(tail)
        if not 0 < elements <= self._elements:
            raise InvalidArgument(
                f"grads have {elements} elements for an expert (expected 1 to {self._elements}, as "
                "many as the weights)"
            )

    @contextlib.contextmanager
    def _hearing_of_losses(self) -> Iterator[None]:
        """Forgets pushed weights if RanksLost is raised within: they may be missing."""
        try:
            yield
        except RanksLost:
            self._forget()
            raise

    def _carry_of(self, name: str, placement: Tensor, *kinds: Any) -> copies.Carry:
        """Returns a `Carry` whose ranks compare the call, its placement, kinds, and how many calls
        have needed no exchange since the last."""
        told = (name, placement.tolist(), kinds)
        turns = itertools.count()

        def carry(blocks: Tensor, to: list[int], sources: list[int]) -> Tensor:
            said = (*told, next(turns), self._num_left_out)
            self._num_left_out, self._is_exchanging = 0, True
            came = self._carry(blocks, to, sources, said)
            self._is_exchanging = False
            return came

        return carry

    def _carry(
        self, blocks: Tensor, to: list[int], sources: list[int], said: tuple[Any, ...]
    ) -> Tensor:
        options = {"copy_engines": self._copy_engines}
        if self._on_peer_loss == "shrink":
            given = (self._carrier, blocks, to, sources, said)
            return copies.carry_from_those_left(*given, **options)
        return copies.carry(self._carrier, blocks, to, len(sources), said, **options)

    def _sends(self, placement: Tensor) -> copies.Sends:
        return copies.sends_of(placement, self.num_local_experts, self.group.rank)

    def _rounds(self, placement: Tensor) -> relaying.Rounds:
        """Returns the rounds in which weights travel, the same on all ranks."""
        every = copies.copies_of(placement, self.num_local_experts)
        num_bytes = sum(copies.bytes_of(one).size(1) for one in self._places)
        device_type = self.device.type
        return relaying.rounds_of(self._relays, every, self._domain_of, num_bytes, device_type)

    def _push(self, held: Held, name: str) -> None:
        """Collective. Sends replicas."""
        if self._carrier is not None:
            slots = [one[self.num_local_experts :] for one in self._places]
            own = [one.contiguous() for one in held.weights]
            carry = self._carry_of(name, held.placement)
            for hops in self._rounds(held.placement):
                from_here = [hop for hop in hops if hop.sender == self.group.rank]
                to_here = [hop for hop in hops if hop.copy.at == self.group.rank]
                copies.pass_weights(slots, own, from_here, to_here, carry)
        self._replicas = held

    def _fill(self, held: Held, name: str) -> None:
        """Collective. Loads masters and replicas of `held` if absent."""
        if held.num_readmitted != self._num_readmitted:  # on all ranks; new ones have no such call
            raise InvalidArgument("apply: ranks were readmitted between forward and backward")
        if self._replicas is held:
            self._num_left_out += 1
        else:
            with self._refusing(name):
                held.check()
                self._push(held, name)
        if self._masters is not held:
            for place, one in zip(self._places, held.weights):
                masters = copies.bytes_of(place[: self.num_local_experts])
                masters.copy_(copies.bytes_of(one.contiguous()))
            self._masters = held

    def _views(self) -> list[Tensor]:
        """Returns the places, as tensors for which later writes do not count as changes."""
        return [one.data for one in self._places]

    @torch.no_grad()
    def _reduce(self, placement: Tensor, own: list[Tensor], slots: list[Tensor], name: str) -> None:
        """Collective."""
        if self._carrier is not None:
            carry = self._carry_of(name, placement, [one.dtype for one in own])
            copies.add_gradients(slots, own, self._sends(placement), carry)

    def _reduced(self, placement: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
        """Collective. Returns the masters' summed gradients of grads [El + R, ...], copied."""
        if not grads:  # on all ranks, or those that have some hear that it was left out here
            self._num_left_out += 1
            return []
        local = self.num_local_experts
        with self._refusing(IN_BACKWARD):
            own = [one[:local].clone(memory_format=torch.contiguous_format) for one in grads]
            self._reduce(placement, own, [one[local:].contiguous() for one in grads], IN_BACKWARD)
        return own

    @torch.no_grad()
    def _sums_of_blocks(self, placement: Tensor, placed: list[PlacedWeight]) -> list[Tensor]:
        """Collective. Returns sums, fp32 [El, ...]."""
        shapes = [one.tensor.shape[1:] for one in placed]
        sizes = [math.prod(shape) for shape in shapes]
        if not placed:
            self._num_left_out += 1
            return []

        def add(place: int, total: Tensor) -> None:
            for one, shape, part in zip(placed, shapes, total.split(sizes)):
                one.add(place, part.view(shape))

        where = (self.num_local_experts, self.group.rank, sum(sizes))
        with self._refusing(IN_BACKWARD):
            carry = self._carry_of(IN_BACKWARD, placement, sizes)
            sums = copies.add_in_turn(placement, where, add, carry, self.device)
        return [
            part.reshape(self.num_local_experts, *shape)
            for part, shape in zip(sums.split(sizes, dim=1), shapes)
        ]


class Held:
    """The weights of one call and their replicas' placement: what `Balance.lend` has lent."""

    def __init__(self, placement: Tensor, weights: Sequence[Tensor], num_readmitted: int) -> None:
        """num_readmitted: how often the balance has taken ranks back by then."""
        self.placement = placement.clone()
        self.num_readmitted = num_readmitted
        self.weights = tuple(one.detach() for one in weights)
        self._versions = self._now()

    def _now(self) -> list[int | None]:
        """Returns weights' versions; inference tensors: None."""
        return [None if one.is_inference() else one._version for one in self.weights]

    def check(self) -> None:
        """Raises InvalidArgument if weights changed."""
        if self._now() != self._versions:
            raise InvalidArgument("weights were changed between forward and backward")

    def is_same(self, other: Held) -> bool:
        """Returns whether a later call has the same placement and memory, and nothing is known to
        have changed that memory."""
        pairs = zip(self.weights, other.weights)
        is_unchanged = None not in self._versions and self._versions == self._now()
        return (
            is_unchanged
            and self._versions == other._versions
            and torch.equal(self.placement, other.placement)
            and all(
                (one.data_ptr(), one.stride()) == (theirs.data_ptr(), theirs.stride())
                for one, theirs in pairs
            )
        )


def _kinds(
    replicas: int, shapes: Sequence[Sequence[int]], dtypes: torch.dtype | Sequence[torch.dtype]
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Returns shape and dtype of an expert's tensors."""
    if not 0 <= replicas <= _core.MOST_REPLICAS:
        raise InvalidArgument(f"replicas = {replicas} (expected 0 to {_core.MOST_REPLICAS})")
    sizes = [tuple(int(size) for size in shape) for shape in shapes]
    for shape in sizes:
        if math.prod(shape) < 1:
            raise InvalidArgument(f"shapes have {list(shape)} (expected at least one element)")
    each = [dtypes] * len(sizes) if isinstance(dtypes, torch.dtype) else list(dtypes)
    if not sizes or len(each) != len(sizes):
        raise InvalidArgument(
            f"{len(sizes)} shapes and {len(each)} dtypes (expected as many, at least 1)"
        )
    return list(zip(sizes, each))


def _check_relays(relays: str, on_peer_loss: str) -> None:
    if relays not in relaying.MODES:
        raise InvalidArgument(f"relays = '{relays}' is unknown (one of: auto, never, always)")
    if relays == "always" and on_peer_loss == "shrink":
        raise InvalidArgument('relays = "always" needs all ranks (on_peer_loss = "fail")')


def _check_wgrad(wgrad: str, queue: Any, weights: Sequence[Tensor]) -> None:
    if wgrad == "blocks" and queue is not None:
        raise InvalidArgument('there is a queue (none with wgrad = "blocks")')
    if wgrad not in ("places", "blocks"):
        raise InvalidArgument(f"wgrad = '{wgrad}' is unknown (one of: places, blocks)")
    for at, one in enumerate(weights):
        if one.requires_grad and one.dtype not in _GRADIENTS:
            raise InvalidArgument(f"weights[{at}] has gradients of {one.dtype} ({_SUMMED})")
        if wgrad == "blocks" and one.dim() != 3:
            raise InvalidArgument(
                f'weights[{at}] has {one.dim()} dimensions (3 with wgrad = "blocks")'
            )


def _zeros(num: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros [num, *shape], also of a dtype torch only stores."""
    size = num * math.prod(shape) * dtype.itemsize
    return torch.zeros(size, dtype=torch.uint8, device=device).view(dtype).view(num, *shape)


def _check(
    name: str, tensor: Any, device: torch.device, dtype: torch.dtype, shape: list[int]
) -> None:
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(f"{name} is a {type(tensor).__name__} (a tensor is expected)")
    found = (tensor.dtype, list(tensor.shape), tensor.device)
    if found != (dtype, shape, device):
        here = " ".join(map(str, found))
        raise InvalidArgument(f"{name} is {here} (expected {dtype} {shape} {device})")
