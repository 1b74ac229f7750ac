# SPDX-License-Identifier: Apache-2.0
"""Training that loses a rank, goes on without it, and takes a new process back in its place.

python -m weft.examples.surviving_training --kill-step 7 --back-step 12

Four processes train the experts of one MoE layer; its router stays as it is. The step during which
a rank is killed is repeated by those that are left, without the lost rank's tokens, which are
dropped until it is back. A lost expert that has a replica goes on from that, any other from its
last checkpoint. One remaining rank trains it, in a place for replicas, and hands it back to the
new process. One rank at a time may be away."""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft.block_products import block_linear

RANKS, LOCAL, REPLICAS = 4, 2, 2
EXPERTS = RANKS * LOCAL
HIDDEN, WIDTH, TOKENS, TOPK = 32, 48, 64, 2
RATE = 0.5
PLACEMENT = [[2, 4], [0, 7], [0, 6], [4, 2]]  # of 1, 3 and 5 there are no replicas
SHAPES = [(HIDDEN, WIDTH), (WIDTH, HIDDEN)]
WAIT = 60.0  # seconds
Weights = list[Tensor]  # of each of SHAPES; here [experts, *shape], or an expert's alone


def first_weights(expert: int) -> Weights:
    maker = torch.Generator().manual_seed(expert)
    return [torch.randn(shape, generator=maker) / shape[0] ** 0.5 for shape in SHAPES]


def batch(rank: int, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Makes x, topk_idx, weights and targets of a rank's tokens."""
    router = torch.randn(HIDDEN, EXPERTS, generator=torch.Generator().manual_seed(77))
    teacher = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(78))
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1000 * step + rank))
    weights, idx = (x @ router / HIDDEN**0.5).softmax(-1).topk(TOPK)
    return x, idx, weights, torch.tanh(x @ teacher / HIDDEN**0.5)


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    """A rank's share of the loss: the sum over its tokens, of the mean with no rank away."""
    return (out - target).square().sum() / (RANKS * TOKENS)


def stand_in_placement(lost: int) -> list[list[int]]:
    """Gives each expert of the lost rank a place on a rank that is left: its first replica's, or a
    spare one."""
    found = [[-1] * REPLICAS for _ in range(RANKS)]
    places = [(rank, at) for rank in range(RANKS) if rank != lost for at in range(REPLICAS)]
    orphans = []
    for expert in range(lost * LOCAL, (lost + 1) * LOCAL):
        held = [(rank, at) for rank, at in places if PLACEMENT[rank][at] == expert]
        if held:
            found[held[0][0]][held[0][1]] = expert
        else:
            orphans.append(expert)
    for expert in orphans:
        rank, at = next((r, a) for r, a in places if found[r][a] < 0)
        found[rank][at] = expert
    return found


class Trainer:
    """One rank's experts, and what it needs to go on when another is lost."""

    def __init__(self, rank: int, args: argparse.Namespace, folder: Path, is_new: bool) -> None:
        self.rank, self.args, self.folder = rank, args, folder
        self.masters = self._empty(LOCAL)
        self.places = self._empty(REPLICAS)  # copies of this step's replicas, or stand-ins
        self.placement = PLACEMENT
        self.lost: int | None = None
        if is_new:
            to_exchange, to_balance = _wait_for(folder / "invitations").read_text().split("\n")
            self.exchange = self._make_exchange(weft.Group.rejoin(rank, to_exchange))
            self.balance = self._make_balance(to_balance)
            self.lost = rank
            self._take_back()
            return
        for at in range(LOCAL):
            for mine, one in zip(self.masters, first_weights(rank * LOCAL + at)):
                mine[at] = one
        self._join("store")
        self.exchange = self._make_exchange(None)
        self.balance = self._make_balance(None)
        self._save(0)

    def run(self, step: int) -> None:
        while step < self.args.steps:
            if step == self.args.back_step and self.lost is not None:
                self._invite()
            ended = self._step(step)
            if ended is None:
                self._go_on_without()
                continue  # the same step again
            self._log(step, ended)
            step += 1
            if step % self.args.save_every == 0:
                self._save(step)
        for at in range(LOCAL):
            torch.save([one[at].clone() for one in self.masters], self._end_file(at))

    def _step(self, step: int) -> float | None:
        """The loss of this rank's tokens; None, and nothing has changed, if a rank was lost."""
        members = self.exchange.alive()
        x, idx, scores, target = batch(self.rank, step)
        placement = weft.Placement(self.placement)
        masters = [one.requires_grad_() for one in self._copies(self.masters)]
        pushed: tuple[Tensor, ...] = ()
        self._die("push", step)
        if self.lost is None:
            pushed = self.balance.push_weights(placement.replicas, masters)
        plan = self.exchange.plan(idx, order="topk", balance=placement)
        if self.exchange.alive() != members:
            return None  # the replicas may be zeros: what there was a step ago is kept
        for mine, one in zip(self.places, pushed):
            mine.copy_(one)
        self._die("dispatch", step)
        rows, row_weights, _ = weft.dispatch(plan, x.requires_grad_(), scores)
        sizes = plan.rows_per_expert_list

        def experts(rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
            return block_linear(block_linear(rows, first, sizes).relu(), second, sizes)

        places = [one.requires_grad_() for one in self._copies(self.places)]
        if self.lost is None:
            rows = self.balance.apply(placement.replicas, experts, rows, *masters)
        else:  # stand-ins are nobody's replicas: their gradients stay here
            rows = experts(rows, *(torch.cat(pair) for pair in zip(masters, places)))
        out = weft.combine(plan, rows * row_weights.view(-1, 1)).x
        loss = loss_of(out, target)
        self._die("backward", step)
        loss.backward()
        self._die("end", step)
        # A rank may be lost to the balance alone: this call tells all the same of it.
        self.exchange.plan(idx[:0])
        if self.exchange.alive() != members:
            return None
        self._update(self.masters, masters)
        if self.lost is not None:
            self._update(self.places, places)
        return loss.item()

    def _go_on_without(self) -> None:
        """Shares out the lost rank's experts among the ranks that are left."""
        gone = sorted(set(range(RANKS)) - set(self.exchange.alive()))
        if self.lost is not None or len(gone) != 1:
            raise RuntimeError(f"ranks {gone} are away (expected one at a time)")
        self.lost = gone[0]
        self.placement = stand_in_placement(self.lost)
        for at, expert in enumerate(self.placement[self.rank]):
            if expert >= 0 and PLACEMENT[self.rank][at] != expert:
                for mine, one in zip(self.places, torch.load(self._file(expert))["weights"]):
                    mine[at] = one

    def _invite(self) -> None:
        """Takes a new process in the lost rank's place; all ranks that are left call it."""
        if self.rank == self.exchange.alive()[0]:
            invitations = [self.exchange.invitation(), self.balance.invitation()]
            _write(self.folder / "invitations", "\n".join(invitations).encode())
        self.exchange.readmit([self.lost])
        self.balance.readmit([self.lost])
        self._take_back()

    def _take_back(self) -> None:
        """Collective. Sends the lost rank's experts back from their stand-ins."""
        self._join("store_after")  # gloo does not know of ranks that come back
        for rank, experts in enumerate(stand_in_placement(self.lost)):
            for at, expert in enumerate(experts):
                if expert < 0:
                    continue
                for master, place in zip(self.masters, self.places):
                    weight = place[at].clone()
                    dist.broadcast(weight, rank)
                    if self.rank == self.lost:
                        master[expert % LOCAL] = weight
        self.lost, self.placement = None, PLACEMENT

    def _make_exchange(self, group: weft.Group | None) -> weft.Exchange:
        return weft.Exchange(
            group,
            hidden=HIDDEN,
            num_experts=EXPERTS,
            max_tokens=TOKENS,
            max_topk=TOPK,
            timeout=WAIT,
            on_peer_loss="shrink",
        )

    def _make_balance(self, invitation: str | None) -> weft.Balance:
        return weft.Balance(
            self.exchange,
            replicas=REPLICAS,
            shapes=SHAPES,
            dtypes=torch.float32,
            timeout=WAIT,
            on_peer_loss="shrink",
            invitation=invitation,
        )

    def _join(self, name: str) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.FileStore(str(self.folder / name), RANKS)
        wait = timedelta(seconds=WAIT)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=RANKS, timeout=wait)

    @staticmethod
    def _empty(num: int) -> Weights:
        return [torch.zeros(num, *shape) for shape in SHAPES]

    @staticmethod
    def _copies(weights: Weights) -> Weights:
        return [one.clone() for one in weights]

    @staticmethod
    def _update(weights: Weights, used: Weights) -> None:
        for one, with_grad in zip(weights, used):
            one -= RATE * with_grad.grad

    def _file(self, expert: int) -> Path:
        return self.folder / f"expert{expert}.pt"

    def _end_file(self, at: int) -> Path:
        return self.folder / f"end{self.rank * LOCAL + at}.pt"

    def _save(self, step: int) -> None:
        """Writes a file, whole at any time, per expert that this rank trains."""
        here = [(self.rank * LOCAL + at, self.masters, at) for at in range(LOCAL)]
        if self.lost is not None:
            mine = enumerate(self.placement[self.rank])
            here += [(expert, self.places, at) for at, expert in mine if expert >= 0]
        for expert, weights, at in here:
            new = self._file(expert).with_suffix(f".{self.rank}")
            torch.save({"step": step, "weights": [one[at].clone() for one in weights]}, new)
            os.replace(new, self._file(expert))

    def _log(self, step: int, loss: float) -> None:
        alive = self.exchange.alive()
        line = {"step": step, "loss": loss, "alive": alive}
        if self.rank == alive[0]:
            print(f"step {step} of {self.args.steps}, alive {alive}", file=sys.stderr, flush=True)
        with open(self.folder / f"log{self.rank}", "a") as file:
            file.write(json.dumps(line) + "\n")

    def _die(self, where: str, step: int) -> None:
        args = self.args
        if (where, step, self.rank) == (args.kill_at, args.kill_step, args.kill_rank):
            os.kill(os.getpid(), signal.SIGKILL)


def _write(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(data)
    os.replace(new, path)


def _wait_for(path: Path) -> Path:
    deadline = time.monotonic() + WAIT
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} has not come within {WAIT:.0f} s")
        time.sleep(0.01)
    return path


def work(rank: int, args: argparse.Namespace, folder: Path, is_new: bool) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(rank, args, folder, is_new)
    trainer.run(args.back_step if is_new else 0)
    dist.barrier()  # nobody leaves before all have ended
    dist.destroy_process_group()


def curve(folder: Path) -> list[tuple[int, float, list[int]]]:
    """Step, loss of all tokens that were there, who was alive: of the ranks' logs."""
    steps: dict[int, tuple[float, list[int]]] = {}
    for path in sorted(folder.glob("log*")):
        for line in path.read_text().splitlines():
            one = json.loads(line)
            loss, alive = steps.get(one["step"], (0.0, one["alive"]))
            if alive != one["alive"]:
                raise RuntimeError(f"step {one['step']}: {alive} or {one['alive']} were alive")
            if int(path.name[3:]) in alive:
                steps[one["step"]] = (loss + one["loss"], alive)
    return [(step, *steps[step]) for step in sorted(steps)]


def train(args: argparse.Namespace, folder: Path) -> None:
    """Raises RuntimeError if another rank than the one to be killed ends with an error."""
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def start(rank: int, is_new: bool = False) -> multiprocessing.Process:
        process = context.Process(target=work, args=(rank, args, folder, is_new), daemon=True)
        process.start()
        return process

    processes = [start(rank) for rank in range(RANKS)]
    victim = processes[args.kill_rank]
    victim.join()
    if victim.exitcode == -signal.SIGKILL:
        processes[args.kill_rank] = start(args.kill_rank, is_new=True)
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--kill-rank", type=int, default=2, choices=range(RANKS))
    parser.add_argument("--kill-step", type=int, default=7)
    parser.add_argument(
        "--kill-at", default="dispatch", choices=["push", "dispatch", "backward", "end"]
    )
    parser.add_argument("--back-step", type=int, default=12, help="when a new process comes")
    parser.add_argument("--folder", type=Path, help="a new one, for checkpoints and logs")
    args = parser.parse_args(words)
    if not 0 < args.kill_step < args.back_step < args.steps:
        parser.error("0 < kill-step < back-step < steps is expected")
    return args


def main() -> int:
    args = parse()
    with tempfile.TemporaryDirectory(prefix="weft_surviving_") as temporary:
        folder = args.folder or Path(temporary) / "run"
        folder.mkdir()  # what another run has left would be taken for this one's
        train(args, folder)
        print(f"{'step':>4} {'loss':>10} {'of a token':>10}  alive")
        for step, loss, alive in curve(folder):
            print(f"{step:4} {loss:10.6f} {loss * RANKS / len(alive):10.6f}  {alive}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
