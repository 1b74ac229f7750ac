# SPDX-License-Identifier: Apache-2.0
"""Lives of ranks, drawn from seeds: calls of every interface in any order, each result compared
with what the inputs of all ranks make of it. A life that goes wrong is named by its seed.

python tests/python/lives --total 10000              steps in all, by lives of 400
python tests/python/lives --seed 7 --steps 123       a life again, up to its step 122
python tests/python/lives --seed 7 --steps 123 --shorten
python tests/python/lives --device cuda --ranks 2 --seconds 60
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import math
import mmap
import multiprocessing
import os
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", WEFT_LOG="error")

import steps_doors  # noqa: F401
import steps_exchange  # noqa: F401
import steps_gpu  # noqa: F401
import steps_mortal  # noqa: F401
import torch
import torch.fx.experimental.symbolic_shapes  # noqa: F401  (a backward wants it; here once for all)
from life import STEPS, Life, Wrong, join

import weft

PATIENCE = 90.0  # seconds without a step of any rank, after which a life hangs
FORK = multiprocessing.get_context("fork")


class Chosen(NamedTuple):
    """Seed and choices of a life: the same ones make the same life."""

    seed: int
    num_ranks: int
    kind: str
    device: str
    steps: tuple[int, ...]
    wrong: int | None = None

    def __str__(self) -> str:
        is_whole = self.steps == tuple(range(len(self.steps)))
        steps = f"steps {len(self.steps)}" if is_whole else f"only {','.join(map(str, self.steps))}"
        return (
            f"--seed {self.seed} --{steps} --ranks {self.num_ranks} --kind {self.kind} "
            f"--device {self.device}"
        )


class Failure(NamedTuple):
    step: int
    rank: int
    text: str


def live(rank: int, chosen: Chosen, store: str, pipe, progress: mmap.mmap, invited=None) -> None:
    """The process of a rank. invited: the step after which it takes a lost rank's place, by which
    invitation, and who is there then."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    gc.freeze()  # a collection then looks at what the life has made
    counts, number, last = Counter(), -1, -1
    try:
        life = Life(rank, chosen.num_ranks, chosen.seed, chosen.kind, chosen.device)
        life.tell, life.progress = pipe.send, progress
        if invited is None:
            life.group = join(store, rank, chosen.num_ranks)
        else:
            last, invitation, life.members = invited
            life.new_exchange(weft.Group.rejoin(rank, invitation))
        for number in chosen.steps:
            if number > last:
                name = life.begin(number)
                struct.pack_into("i", progress, 4 * rank, number)
                if number == chosen.wrong:
                    raise Wrong("a step is to fail")
                life.make(name)
                counts[name] += 1
        for held in (life.kept, life.buffers, life.exchanges):
            held.clear()
        gc.collect()
        pipe.send(("done", counts))
    except SystemExit:
        pass  # this rank has left
    except BaseException:
        name = life.begin(number) if number >= 0 else "the begin"
        pipe.send(("failed", number, f"in {name}: {traceback.format_exc()}"))
    sys.stderr.flush()
    os._exit(0)


class Player:
    """The processes of one life."""

    def __init__(self, chosen: Chosen, folder: str) -> None:
        self.chosen, self.store = chosen, f"{folder}/store"
        self.progress = mmap.mmap(-1, 4 * chosen.num_ranks)
        self.ranks: dict[Connection, tuple[int, multiprocessing.Process]] = {}
        self.leaving: set[int] = set()
        self.counts: Counter = Counter()
        for rank in range(chosen.num_ranks):
            self.start(rank)

    def start(self, rank: int, invited=None) -> None:
        ours, theirs = FORK.Pipe()
        given = (rank, self.chosen, self.store, theirs, self.progress, invited)
        process = FORK.Process(target=live, args=given, daemon=True)
        process.start()
        theirs.close()
        self.ranks[ours] = (rank, process)

    def play(self, patience: float) -> Failure | None:
        """Until all ranks have come to their ends; the first failure, if any."""
        moved, seen = time.monotonic(), b""
        while self.ranks:
            for pipe in wait(list(self.ranks), timeout=1):
                failure = self.hear(pipe)
                if failure is not None:
                    return failure
            if seen != self.progress[:]:
                moved, seen = time.monotonic(), self.progress[:]
            elif time.monotonic() - moved > patience:
                return self.stuck(patience)
        return None

    def hear(self, pipe: Connection) -> Failure | None:
        rank, process = self.ranks[pipe]
        try:
            what, *said = pipe.recv()
        except (EOFError, ConnectionError):
            del self.ranks[pipe]
            process.join()
            if rank in self.leaving:
                self.leaving.discard(rank)
                return None
            return Failure(self.step_of(rank), rank, f"its process ended with {process.exitcode}")
        if what == "failed":
            return Failure(said[0], rank, said[1])
        if what == "done":
            self.counts += said[0]
        if what in ("done", "leaving"):
            self.leaving.add(rank)
        if what == "invited":
            self.start(*said)
        return None

    def stuck(self, patience: float) -> Failure:
        for rank, process in self.ranks.values():
            print(f"rank {rank}:", file=sys.stderr, flush=True)
            os.kill(process.pid, signal.SIGUSR1)  # prints its stacks
            time.sleep(0.3)
        behind = min((self.step_of(rank), rank) for rank, _ in self.ranks.values())
        return Failure(*behind, f"no step for {patience:.0f} s")

    def step_of(self, rank: int) -> int:
        return struct.unpack_from("i", self.progress, 4 * rank)[0]

    def stop(self) -> None:
        for pipe, (_, process) in self.ranks.items():
            pipe.close()
            process.kill()
            process.join()


def play(chosen: Chosen, counts: Counter, patience: float = PATIENCE) -> Failure | None:
    with tempfile.TemporaryDirectory(prefix="weft_lives_") as folder:
        player = Player(chosen, folder)
        try:
            return player.play(patience)
        finally:
            player.stop()
            counts.update(player.counts)


def shortened(chosen: Chosen, failure: Failure, patience: float) -> tuple[Chosen, Failure]:
    """Fewer steps that fail as well: leaves out half of them, a quarter, and so on."""
    steps = [number for number in chosen.steps if number <= failure.step]
    size = max(1, len(steps) // 2)
    while True:
        begin = 0
        while begin < len(steps):
            fewer = steps[:begin] + steps[begin + size :]
            found = fewer and play(chosen._replace(steps=tuple(fewer)), Counter(), patience)
            if not found:
                begin += size
            else:
                failure, steps = found, [number for number in fewer if number <= found.step]
        if size == 1:
            return chosen._replace(steps=tuple(steps)), failure
        size //= 2


def chosen_by(seed: int, given: argparse.Namespace) -> Chosen:
    """The life of a seed, but for what is given."""
    rng = random.Random(seed)
    on_gpu = given.device != "cpu"
    num_ranks = given.ranks or rng.choice([2, 2, 2, 3, 4])
    kind = given.kind or ("mortal" if not on_gpu and num_ranks > 2 else "steady")
    steps = given.only or range(given.steps or 400)
    return Chosen(seed, num_ranks, kind, given.device, tuple(steps), given.wrong)


def play_all(first: int, stride: int, given: argparse.Namespace) -> int:
    """Lives of every `stride`-th seed; 1 at the first that fails."""
    counts, begin, seed, num_steps = Counter(), time.monotonic(), first, 0
    while True:
        chosen = chosen_by(seed, given)
        failure = play(chosen, counts, given.patience)
        if failure is not None and given.shorten:
            chosen, failure = shortened(chosen, failure, given.patience)
        if failure is not None:
            upto = tuple(number for number in chosen.steps if number <= failure.step)
            again = chosen._replace(steps=upto or chosen.steps)
            print(
                f"lives: step {failure.step} failed on rank {failure.rank}, {failure.text}\n"
                f"again: python tests/python/lives {again}",
                flush=True,
            )
            return 1
        num_steps += len(chosen.steps)
        seed += stride
        seconds = time.monotonic() - begin
        if given.verbose:
            print(f"{chosen}: right, {num_steps} steps in {seconds:.1f} s", flush=True)
        is_over = seconds >= given.seconds and num_steps * stride >= given.total
        if is_over or seconds >= given.limit:
            break
    if given.verbose:
        print(dict(counts.most_common()))
        print("never:", sorted(set(STEPS) - set(counts)))
    print(f"lives: {num_steps} steps from seed {first}, all right, {seconds:.1f} s", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Random lives of ranks, every result compared")
    parser.add_argument("--seed", type=int, default=1, help="of the first life")
    parser.add_argument("--steps", type=int, help="of a life (400)")
    parser.add_argument("--total", type=int, default=0, help="steps of all lives, at least")
    parser.add_argument("--seconds", type=float, default=0, help="begin lives for so long")
    parser.add_argument("--limit", type=float, default=math.inf, help="begin none after so long")
    parser.add_argument("--ranks", type=int, help="of each life; else by its seed")
    parser.add_argument("--kind", choices=["steady", "mortal"], help="mortal: ranks die and return")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="lives at a time")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds without a step")
    parser.add_argument("--shorten", action="store_true", help="leave out steps while it fails")
    parser.add_argument("--verbose", action="store_true")
    numbers = lambda text: [int(number) for number in text.split(",")]  # noqa: E731
    parser.add_argument("--wrong", type=int, help="a step that fails, to see what is said of it")
    parser.add_argument("--only", type=numbers, help="the steps with these numbers")
    given = parser.parse_args()
    if given.jobs == 1:
        return play_all(given.seed, 1, given)
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(
            target=lambda first: sys.exit(play_all(first, given.jobs, given)),
            args=(given.seed + job,),
        )
        for job in range(given.jobs)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(worker.exitcode for worker in workers)


if __name__ == "__main__":
    sys.exit(main())
