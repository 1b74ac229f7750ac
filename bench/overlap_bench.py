#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what an exchange beside the experts' products costs them, by the SMs it may occupy.

torchrun --nproc-per-node 4 bench/overlap_bench.py --json FILE --commit HASH

One stream repeats the two products of the experts of a case, another dispatches or combines
without a pause. A hidden exchange costs what the products lose while one exchange lasts: `cost_us`.

The same for calls by copy engines, whose SMs only pack rows before and store or add them after.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch_bench import CASES, Case, row_of, say

import weft
from weft.examples.program import machine

Tensor = torch.Tensor
ROUNDS = 7


@dataclass
class Work:
    """One rank's experts and tokens of a case."""

    case: Case
    exchange: weft.Exchange
    plan: weft.Plan
    x: Tensor  # [T, H]
    rows: Tensor  # [P, H]
    ends: Tensor  # int32 [El]
    up: Tensor  # [El, H, 2 W]
    down: Tensor  # [El, W, H]

    @classmethod
    def of(cls, case: Case) -> Work:
        device = torch.device("cuda", torch.cuda.current_device())
        exchange = weft.Exchange(
            hidden=case.hidden,
            num_experts=case.experts,
            max_tokens=case.tokens,
            max_topk=case.topk,
            device=device,
            copy_engines=True,
        )
        scores = torch.rand(case.tokens, case.experts, device=device)
        experts = scores.topk(case.topk).indices
        plan = exchange.plan(experts, pad_multiple=128)
        x = torch.randn(case.tokens, case.hidden, device=device).to(torch.bfloat16)
        local = exchange.num_local_experts
        sizes = ((local, case.hidden, 2 * case.width), (local, case.width, case.hidden))
        up, down = (torch.randn(size, device=device).to(torch.bfloat16) * 0.02 for size in sizes)
        ends = plan.padded_rows_per_expert.cumsum(0).to(torch.int32)
        rows = exchange.dispatch(plan, x).rows
        return cls(case, exchange, plan, x, rows, ends, up, down)

    def products(self) -> None:
        inner = torch._grouped_mm(self.rows, self.up, offs=self.ends)
        torch._grouped_mm(inner[:, : self.case.width].contiguous(), self.down, offs=self.ends)

    def exchanges(self, op: str, num_sms: int, copies: bool):
        how = {"num_sms": num_sms, "copy_engines": copies}
        if op == "dispatch":
            return lambda: self.exchange.dispatch(self.plan, self.x, **how)
        return lambda: self.exchange.combine(self.plan, self.rows, **how)


def events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def beside(products, exchange, num_products: int, num_exchanges: int) -> tuple[float, float, float]:
    """Collective. us of the products, of an exchange while they ran (mean), of one after them."""
    side = beside.stream
    start, end = events(2)
    marks = events(num_exchanges + 1)
    flag = torch.zeros(1, device="cuda")
    dist.all_reduce(flag)
    torch.cuda._sleep(20_000_000)  # until both streams have their work
    start.record()
    side.wait_event(start)
    with torch.cuda.stream(side):
        marks[0].record()
        for mark in marks[1:]:
            if exchange is not None:
                exchange()
            mark.record()
    for _ in range(num_products):
        products()
    end.record()
    torch.cuda.synchronize()
    times = [1e3 * start.elapsed_time(mark) for mark in marks]
    total = 1e3 * start.elapsed_time(end)
    during = [b - a for a, b in zip(times, times[1:]) if b <= total]
    after = [b - a for a, b in zip(times, times[1:]) if a >= total]
    return (
        total,
        statistics.mean(during) if during else total,  # some wait for a product to end
        statistics.median(after) if after else 0.0,
    )


def measure(name: str, sms: list[int]) -> list[dict]:
    case = CASES[name]
    work = Work.of(case)
    beside.stream = torch.cuda.Stream(priority=-1)

    def slowest(values: list[float]) -> list[float]:
        times = torch.tensor(values, device="cuda")
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return times.tolist()

    def medians(*args) -> list[float]:
        found = [slowest(list(beside(*args))) for _ in range(ROUNDS + 2)][2:]
        return [statistics.median(column) for column in zip(*found)]

    one = medians(work.products, None, 8, 0)[0] / 8
    num_products = max(8, round(8000 / one))
    kinds = [
        (op + (" by copies" if copies else ""), n, work.exchanges(op, n, copies))
        for copies in (False, True)
        for op in ("dispatch", "combine")
        for n in sms
    ]
    rows = []
    for op, num_sms, run in kinds:
        alone = medians(work.products, None, num_products, 0)[0]
        quiet = medians(lambda: None, run, 1, 12)[2]
        num_exchanges = round(2.0 * alone / quiet) + 4
        total, loaded, _ = medians(work.products, run, num_products, num_exchanges)
        row = row_of(op, name, "beside products", [loaded], work.plan.layout)
        lost = total / alone - 1
        row |= {
            "sms": num_sms,
            "quiet_us": round(quiet, 3),
            "products_us": round(alone / num_products, 3),
            "slowdown": round(lost, 5),
            "cost_us": round(loaded * (1 - alone / total), 3),
        }
        rows.append(row)
        say(
            f"{name} {op:<18} {num_sms:>3} SMs {quiet:8.1f} us alone {loaded:8.1f} us beside "
            f"products, which are {100 * lost:5.1f} % slower: costs {row['cost_us']:7.1f} us"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["A", "B"])
    parser.add_argument("--sms", nargs="+", type=int, default=[8, 16, 24, 32, 48, 64, 96, 132])
    parser.add_argument("--json", help="results file")
    parser.add_argument("--commit", help="that the build is of; default: asks git")
    args = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # not everywhere allowed
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rows = [row for name in args.cases for row in measure(name, args.sms)]
    if args.json and dist.get_rank() == 0:
        with open(args.json, "w") as file:
            json.dump({**machine(args.commit), "rows": rows}, file, indent=1)
            file.write("\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
