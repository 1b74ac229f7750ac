#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What an exchange beside the experts' products costs them, by the SMs it may occupy.

torchrun --nproc-per-node 4 bench/overlap_bench.py --json FILE --commit HASH

One stream repeats the two products of the experts of a case, another dispatches or combines
without a pause. A hidden exchange costs what the products lose while one exchange lasts: `cost_us`.

Beside them stand the steps of a dispatch by copy engines, each by itself: `pack` the rows of each
peer into a block, by all SMs at once; `copies` of these blocks, by no SM; `fan-out` of what arrives
to the rows of its experts. With layout rank_major the first two would be all.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch_bench import CASES, Case, row_of, say

import weft
from weft.examples.measured import machine

Tensor = torch.Tensor
ROUNDS = 7
FAN_OUT_SMS = (8, 12, 16, 132)


class PeerRoom:
    """Collective. Memory of each rank for every peer, which copy engines reach: torch's own copies
    between processes take the way through the host."""

    def __init__(self, num_bytes: int) -> None:
        self.cuda = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        own, num_ranks = dist.get_rank(), dist.get_world_size()
        handles = []
        for _ in range(num_ranks):
            data, handle = ctypes.c_void_p(), (ctypes.c_char * 64)()
            self.check(self.cuda.cudaMalloc(ctypes.byref(data), ctypes.c_size_t(num_bytes)))
            self.check(self.cuda.cudaIpcGetMemHandle(handle, data))
            handles.append(bytes(handle))
        everyones = [None] * num_ranks
        dist.all_gather_object(everyones, handles)
        self.there = {}
        for peer in range(num_ranks):
            if peer != own:
                self.there[peer] = self.open(everyones[peer][own])

    def open(self, raw: bytes) -> ctypes.c_void_p:
        class Handle(ctypes.Structure):
            _fields_ = [("bytes", ctypes.c_char * 64)]

        data, with_peer_access = ctypes.c_void_p(), 1
        handle = Handle.from_buffer_copy(raw)
        self.check(self.cuda.cudaIpcOpenMemHandle(ctypes.byref(data), handle, with_peer_access))
        return data

    def copy_to(self, peer: int, block: Tensor) -> None:
        device_to_device = 3
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.check(
            self.cuda.cudaMemcpyAsync(
                self.there[peer],
                ctypes.c_void_p(block.data_ptr()),
                ctypes.c_size_t(block.nbytes),
                device_to_device,
                stream,
            )
        )

    @staticmethod
    def check(error: int) -> None:
        if error != 0:
            raise RuntimeError(f"CUDA error {error}")


@dataclass
class Work:
    """One rank's experts and tokens of a case."""

    case: Case
    exchange: weft.Exchange
    plan: weft.Plan
    sent: dict[int, Tensor]  # by peer: int64 [tokens that go there]
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
        )
        scores = torch.rand(case.tokens, case.experts, device=device)
        experts = scores.topk(case.topk).indices
        plan = exchange.plan(experts, pad_multiple=128)
        x = torch.randn(case.tokens, case.hidden, device=device).to(torch.bfloat16)
        local = exchange.num_local_experts
        sent = {
            rank: (experts // local == rank).any(1).nonzero().flatten()
            for rank in range(dist.get_world_size())
            if rank != dist.get_rank()
        }
        sizes = ((local, case.hidden, 2 * case.width), (local, case.width, case.hidden))
        up, down = (torch.randn(size, device=device).to(torch.bfloat16) * 0.02 for size in sizes)
        ends = plan.padded_rows_per_expert.cumsum(0).to(torch.int32)
        rows = exchange.dispatch(plan, x).rows
        return cls(case, exchange, plan, sent, x, rows, ends, up, down)

    def products(self) -> None:
        inner = torch._grouped_mm(self.rows, self.up, offs=self.ends)
        torch._grouped_mm(inner[:, : self.case.width].contiguous(), self.down, offs=self.ends)

    def exchanges(self, op: str, num_sms: int):
        if op == "dispatch":
            return lambda: self.exchange.dispatch(self.plan, self.x, num_sms=num_sms)
        return lambda: self.exchange.combine(self.plan, self.rows, num_sms=num_sms)

    def pack(self):
        blocks = {peer: self.x[tokens] for peer, tokens in self.sent.items()}

        def run() -> None:
            for peer, tokens in self.sent.items():
                torch.index_select(self.x, 0, tokens, out=blocks[peer])

        return run

    def copies(self):
        """Collective. What this rank packs, into memory of its peers."""
        blocks = {peer: self.x[tokens] for peer, tokens in self.sent.items()}
        room = PeerRoom(self.x.nbytes)

        def run() -> None:
            for peer, block in blocks.items():
                room.copy_to(peer, block)

        return run

    def fan_out(self, num_sms: int):
        """Collective. As many arrivals as this rank has, to about as many rows, all of its own."""
        groups = [dist.new_group([rank], backend="gloo") for rank in range(dist.get_world_size())]
        arrivals = sum(self.plan.received_arrivals)
        per_arrival = max(1, round(sum(self.plan.rows_per_expert_list) / arrivals))
        exchange = weft.Exchange(
            groups[dist.get_rank()],
            hidden=self.case.hidden,
            num_experts=self.exchange.num_local_experts,
            max_tokens=arrivals,
            max_topk=per_arrival,
            device=self.x.device,
        )
        x = self.x.repeat(-(-arrivals // self.x.size(0)), 1)[:arrivals]
        scores = torch.rand(arrivals, exchange.num_experts, device=x.device)
        plan = exchange.plan(scores.topk(per_arrival).indices, pad_multiple=128)
        return lambda: exchange.dispatch(plan, x, num_sms=num_sms)


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
    num_products = max(4, round(8000 / one))
    kinds = [(op, n, work.exchanges(op, n)) for op in ("dispatch", "combine") for n in sms]
    all_sms = torch.cuda.get_device_properties(work.x.device).multi_processor_count
    kinds += [("pack", all_sms, work.pack()), ("copies", 0, work.copies())]
    kinds += [("fan-out", n, work.fan_out(n)) for n in FAN_OUT_SMS]
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
            f"{name} {op:<9} {num_sms:>3} SMs {quiet:8.1f} us alone {loaded:8.1f} us beside "
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
