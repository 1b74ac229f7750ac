#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns files of `weft tune` into the table that is built in: of each operation, number of ranks and
row size the splits that no smaller number of multiprocessors beats.

usage: tools/tuning_table.py bench/tuning/2xh200.json bench/tuning/4xh200.json > src/exchange/tuning_table.hpp
"""

import json
import sys

HEAD = """// SPDX-License-Identifier: Apache-2.0
// Made by tools/tuning_table.py from {source}; not to be edited.
#pragma once

#include <array>

#include "exchange/tuning.hpp"

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


def main(paths):
    splits = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            splits += json.load(file)["splits"]
    kinds = {}
    for split in splits:
        kinds.setdefault((split["op"], split["ranks"], split["row_bytes"]), []).append(split)
    rows = [row for kind in sorted(kinds) for row in best_splits(kinds[kind])]
    print(HEAD.format(source=" and ".join(paths), count=len(rows)), end="")
    for row in rows:
        op = "TunedOp::k" + row["op"].capitalize()
        print(f"    {{{op}, {row['ranks']}, {row['row_bytes']}, {{{row['senders']}, {row['others']}}}, {row['us']}}},")
    print(TAIL, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
