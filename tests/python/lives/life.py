# SPDX-License-Identifier: Apache-2.0
"""One rank's life: what it holds between steps, and how steps are drawn, made and compared. All
ranks draw the same, from the life's seed and the number of the step, so that none has to ask."""

from __future__ import annotations

import contextlib
import mmap
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from reference import Batch, Rows

import weft

TIMEOUT = 20.0  # seconds of a wait, in which a rank may be late on a busy machine


class Step(NamedTuple):
    """A kind of step. weight: how often it comes, beside others; lives: in which kinds of life."""

    make: Callable[[Life], None]
    weight: float
    lives: str
    device: str


STEPS: dict[str, Step] = {}


def step(weight: float, lives: str = "steady mortal", device: str = "") -> Callable:
    def add(make: Callable[[Life], None]) -> Callable[[Life], None]:
        STEPS[make.__name__] = Step(make, weight, lives, device)
        return make

    return add


class Wrong(AssertionError):
    """A result is not what it must be."""


def same(what: str, got: Any, want: Any) -> None:
    """Bit for bit but for the sign of zero."""
    if not isinstance(want, torch.Tensor):
        if got != want:
            raise Wrong(f"{what} = {got} (expected {want})")
        return
    got = got.detach().cpu()
    if got.dtype != want.dtype or got.shape != want.shape:
        kinds = [(one.dtype, tuple(one.shape)) for one in (got, want)]
        raise Wrong(f"{what} is {kinds[0]} (expected {kinds[1]})")
    if not torch.equal(got, want):
        wrong = (got != want).nonzero()
        at = tuple(wrong[0].tolist())
        values = f"{got[at].item()} (expected {want[at].item()})"
        raise Wrong(f"{what}: {len(wrong)} of {got.numel()} differ, the first at {at}: {values}")


def near(what: str, got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor | float) -> None:
    """Within `bound` of each number."""
    error = (got.detach().cpu().float() - want.float()).abs()
    if not bool((error <= bound).all()):
        raise Wrong(
            f"{what}: off by up to {error.max().item()} (bound {torch.as_tensor(bound).max()})"
        )


class Held(NamedTuple):
    """An exchange."""

    exchange: weft.Exchange
    hidden: int
    num_experts: int
    is_mortal: bool

    def alive(self) -> tuple[int, ...]:
        """Ranks that took part in the last call; (): all."""
        return tuple(self.exchange.alive()) if self.is_mortal else ()


class Kept(NamedTuple):
    """A plan or a handle that a call has made for later ones, and where its rows lie."""

    handle: Any
    rows: Rows
    batch: Batch
    holder: Any = None  # the exchange or buffer
    how: dict = {}

    def again(self, life: Life) -> Batch:
        return self.batch.again(life.gen)


class Life:
    def __init__(self, rank: int, num_ranks: int, seed: int, kind: str, device: str) -> None:
        self.rank, self.num_ranks, self.seed, self.kind = rank, num_ranks, seed, kind
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
            self.streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        rng = random.Random(seed)
        widths, experts = rng.sample([32, 128, 256], 2), rng.choices([1, 2, 4], k=2)
        # Hidden sizes and numbers of experts of calls by buffers.
        self.sizes = [(width, each * num_ranks) for width, each in zip(widths, experts)]
        self.exchanges: list[Held] = []
        self.kept: dict[str, list[Kept]] = {}
        self.buffers: dict[str, Any] = {}
        self.members = list(range(num_ranks))
        self.group = None  # of torch.distributed; none for a process that has come back
        self.tell: Callable[[tuple], Any] = lambda _: None  # the program that has started it
        self.progress: mmap.mmap  # the number of each rank's step
        self.number = -1
        self.rng, self.own, self.gen = random.Random(), random.Random(), torch.Generator()
        self.table = list(
            zip(
                *(
                    (name, one.weight)
                    for name, one in STEPS.items()
                    if kind in one.lives and self.device.type.startswith(one.device)
                )
            )
        )

    def begin(self, number: int) -> str:
        """The kind of this step."""
        self.number = number
        self.rng.seed(self.seed << 32 | number)
        self.gen.manual_seed(self.rng.getrandbits(60))
        self.own.seed(self.rng.getrandbits(60) + self.rank)
        return self.rng.choices(*self.table)[0]

    def make(self, name: str) -> None:
        if self.own.random() < 0.02:
            time.sleep(self.own.random() * 0.003)  # this rank is late
        with contextlib.ExitStack() as stack:
            if self.device.type == "cuda":
                stream = self.rng.choice(self.streams)
                stream.wait_stream(torch.cuda.current_stream())
                stack.enter_context(torch.cuda.stream(stream))
            try:
                STEPS[name].make(self)
            except Wrong as wrong:
                raise Wrong(f"{wrong}{self.faults()}") from wrong
        if self.device.type == "cuda":
            torch.cuda.current_stream().wait_stream(stream)

    def faults(self) -> str:
        """Calls of the last step may have come to nothing, of which a GPU has told nobody yet."""
        found = ""
        for held in self.exchanges:
            try:
                held.exchange.check()
            except weft.Error as error:
                found += f"; its exchange says: {error}"
        return found

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def there(self, *tensors: torch.Tensor | None) -> Any:
        """On the life's device."""
        moved = [None if one is None else one.to(self.device) for one in tensors]
        return moved[0] if len(moved) == 1 else moved

    def tokens(self, most: int = 12) -> list[int]:
        """Number of tokens of each rank: often none."""
        each = [self.rng.choice([0, 1, self.rng.randint(0, most), most]) for _ in self.all]
        return [0] * len(each) if self.chance(0.03) else each

    @property
    def all(self) -> range:
        return range(self.num_ranks)

    def batch(self, hidden: int, num_experts: int, kind="any", topk=None, tokens=None, dtype=None):
        rng = self.rng
        topk = topk or rng.choice([1, 2, 3, 4])
        topk = topk if kind == "any" else min(topk, num_experts)
        dtype = dtype or rng.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
        tokens = tokens if tokens is not None else self.tokens()
        hot = rng.randrange(num_experts) if self.chance(0.2) else None
        return Batch(self.gen, tokens, hidden, topk, num_experts, dtype, kind, hot)

    def own_part(self, batch: Batch) -> list[torch.Tensor]:
        """x, idx and weights of this rank, where the calls are made."""
        return self.there(*(batch.of(self.rank, v) for v in (batch.x, batch.idx, batch.weights)))

    # What is held.

    def held(self) -> Held:
        """One of the exchanges; the first step makes one."""
        if not self.exchanges:
            self.new_exchange()
        return self.rng.choice(self.exchanges)

    def new_exchange(self, group: weft.Group | None = None) -> Held:
        is_mortal = self.kind == "mortal"
        # A process that comes back makes the exchange of the others.
        rng = random.Random(self.seed) if is_mortal else self.rng
        hidden = rng.choice([16, 32, 128, 256])
        num_experts = self.num_ranks * rng.choice([1, 2, 4])
        options = {"max_tokens": rng.choice([2, 16, 64]), "max_topk": rng.choice([1, 4])}
        options["num_threads"] = rng.choice([1, 1, 1, 2])
        if is_mortal:
            options["on_peer_loss"] = "shrink"
        exchange = weft.Exchange(
            group or self.group,
            hidden=hidden,
            num_experts=num_experts,
            device=self.device,
            timeout=TIMEOUT,
            **options,
        )
        self.exchanges.append(Held(exchange, hidden, num_experts, is_mortal))
        return self.exchanges[-1]

    def buffer(self, name: str, make: Callable[[], Any]) -> Any:
        """The buffer of this name."""
        if name not in self.buffers:
            self.buffers[name] = make()
        return self.buffers[name]

    def keep(self, name: str, kept: Kept) -> Kept:
        """For later; of more than five one goes."""
        there = self.kept.setdefault(name, [])
        there.append(kept)
        if len(there) > 5:
            del there[self.rng.randrange(5)]
        return kept

    def found(self, name: str) -> Kept | None:
        """One of those that were kept, whatever has been called since."""
        there = self.kept.get(name)
        return self.rng.choice(there) if there else None

    def forget(self, holder: Any, *names: str) -> None:
        """Drops what was kept under these names by an exchange or buffer that ends."""
        for name in names:
            there = self.kept.get(name, [])
            there[:] = [one for one in there if one.holder is not holder]

    # Calls that are refused.

    def refused(
        self, culprit: int, call: Callable[[bool], Any], reason="", by=None, is_told_next=False
    ) -> None:
        """call(is_wrong) of all ranks, wrong on one: all hear of it, the others which it was. by:
        the plan or the exchange of a call that does not wait; on a GPU it is asked what has come of
        the call. is_told_next: there the rank hears of its mistake by its next call, and the others
        that this is refused.
        """
        try:
            call(self.rank == culprit)
            if by is not None and self.device.type == "cuda":
                torch.cuda.synchronize()
                if is_told_next:
                    call(False)
                    torch.cuda.synchronize()
                (by if isinstance(by, weft.Exchange) else by.calls).check()
        except weft.InvalidArgument as error:
            text = str(error)
            if self.rank != culprit and f"rank {culprit}" not in text or reason not in text:
                raise Wrong(f"a refusal that does not name rank {culprit} or {reason!r}") from error
            return
        raise Wrong("a call with a wrong argument was taken")


def join(store: str, rank: int, num_ranks: int) -> Any:
    """The process group of a life's ranks."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks
    )
    return dist.group.WORLD
