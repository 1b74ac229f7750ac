#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finds out whether rows of an expert's matrix product have the same bits whatever is beside them.

bench/products_bench.py [--device cuda] --json FILE

Nothing is timed. "grouped" is `torch._grouped_mm` of all experts, "per expert" a product for each.
A row of FILE says from how many rows on a product's rows have the bits that they have among more
(rows_from; 1: always, null: not even then), and whether they also keep them at another place
(moves; null where there are none) and beside other experts' rows (beside; null where each expert
has a product of its own).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from weft.examples.program import machine

# Inner and outer size: experts of Qwen3-30B-A3B there and back, of DeepSeek-V3 there, and small.
SHAPES = [(2048, 768), (768, 2048), (7168, 2048), (64, 48)]
ROWS = 300  # of an expert
COUNTS = [1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 100, 127, 128, 129, 255, 256]
EXPERTS = 3
Product = Callable[[list[Tensor], Tensor], list[Tensor]]


def per_expert(rows: list[Tensor], weights: Tensor) -> list[Tensor]:
    return [one @ weight for one, weight in zip(rows, weights)]


def grouped(rows: list[Tensor], weights: Tensor) -> list[Tensor]:
    counts = [len(one) for one in rows]
    ends = torch.tensor(counts, device=weights.device).cumsum(0).to(torch.int32)
    made = torch._grouped_mm(torch.cat(rows), weights, offs=ends)
    return list(made.split(counts))


PRODUCTS: dict[str, Product] = {"grouped": grouped, "per expert": per_expert}


def has_same_rows(
    product: Product, given: list[Tensor], weights: Tensor, begin: int, n: int
) -> bool:
    """Return whether rows `begin` to `begin + n` of the middle expert equal those made alone."""
    among = product(given, weights)[1][begin : begin + n]
    alone = product([given[0], given[1][begin : begin + n].contiguous(), given[2]], weights)[1]
    return torch.equal(alone, among)


def find(kind: str, dtype: torch.dtype, inner: int, outer: int, device: torch.device) -> dict:
    gen = torch.Generator().manual_seed(inner)
    product = PRODUCTS[kind]
    weights = torch.randn(EXPERTS, inner, outer, generator=gen).to(device, dtype)
    given = [torch.randn(ROWS, inner, generator=gen).to(device, dtype) for _ in range(EXPERTS)]
    rows_from: int | None = None
    for n in reversed(COUNTS):
        if not has_same_rows(product, given, weights, 0, n):
            break
        rows_from = n
    moves = None
    if rows_from is not None:
        kept = [n for n in COUNTS if n >= rows_from]
        moves = all(has_same_rows(product, given, weights, at, n) for at in (1, 17) for n in kept)
    other = [given[2][:7], given[1], given[0][:130]]
    beside = torch.equal(product(other, weights)[1], product(given, weights)[1])
    row = {"op": "product_rows", "executor": device.type, "product": kind}
    row |= {"dtype": str(dtype).removeprefix("torch."), "inner": inner, "outer": outer}
    row |= {"rows_from": rows_from, "moves": moves}
    return row | {"beside": beside if kind == "grouped" else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--json", help="results file")
    parser.add_argument("--commit", help="that the build is of; default: asks git")
    args = parser.parse_args()
    device = torch.device(args.device)
    rows = []
    for kind in PRODUCTS:
        for dtype in (torch.bfloat16, torch.float32):
            if kind == "grouped" and dtype == torch.float32 and device.type == "cuda":
                continue  # torch has none
            for inner, outer in SHAPES:
                rows.append(find(kind, dtype, inner, outer, device))
                print(*rows[-1].values(), flush=True)
    if args.json:
        text = json.dumps(
            {**machine(args.commit), "torch": torch.__version__, "rows": rows}, indent=1
        )
        Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
