#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns a file of `weft tune` into the table that is built in: of each operation and row size the
splits that no smaller number of multiprocessors beats.

usage: tools/tuning_table.py bench/tuning/h200.json > src/exchange/tuning_table_cuda.hpp
"""

import json
import sys

HEAD = """// SPDX-License-Identifier: Apache-2.0
// Made by tools/tuning_table.py from {source}; not to be edited.
#pragma once

#include <array>

#include "exchange/sms_cuda.hpp"

namespace weft {{

inline constexpr std::array<TunedSplit, {count}> kBuiltInTuning = {{{{
"""
TAIL = "}};\n\n}  // namespace weft\n"


def sms(split):
    return split["senders"] + split["others"]


def best_splits(splits):
    """The fastest of each number of multiprocessors, if it is faster than all with fewer."""
    kept = []
    for split in sorted(splits, key=lambda s: (sms(s), s["us"])):
        if not kept or split["us"] < kept[-1]["us"]:
            if kept and sms(kept[-1]) == sms(split):
                kept.pop()
            kept.append(split)
    return kept


def main(path):
    with open(path, encoding="utf-8") as file:
        splits = json.load(file)["splits"]
    rows = []
    for op in ("dispatch", "combine"):
        for row_bytes in sorted({s["row_bytes"] for s in splits}):
            rows += best_splits([s for s in splits if (s["op"], s["row_bytes"]) == (op, row_bytes)])
    print(HEAD.format(source=path, count=len(rows)), end="")
    for row in rows:
        op = "TunedOp::k" + row["op"].capitalize()
        print(f"    {{{op}, {row['row_bytes']}, {{{row['senders']}, {row['others']}}}, {row['us']}}},")
    print(TAIL, end="")


if __name__ == "__main__":
    main(sys.argv[1])
