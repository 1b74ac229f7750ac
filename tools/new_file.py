#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a new source, its header and its test in house form.

tools/new_file.py src/plan/slot_map.cpp "Where each route's row lies."
"""

import argparse
import sys
from pathlib import Path

import tree

HEADER = """\
// SPDX-License-Identifier: Apache-2.0
// {purpose}
#pragma once

namespace weft {{

}}  // namespace weft
"""
SOURCE = """\
// SPDX-License-Identifier: Apache-2.0
#include "{header}"

namespace weft {{

}}  // namespace weft
"""
TEST = """\
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "{header}"

namespace weft {{
namespace {{

TEST({name}Test, SaysWhatHolds) {{ FAIL() << "not written"; }}

}}  // namespace
}}  // namespace weft
"""


def new_files(place, purpose):
    """{place: text} for src/<folder>/<stem>.cpp."""
    inside = place.relative_to("src").with_suffix("")
    header = inside.with_suffix(".hpp").as_posix()
    name = "".join(word.capitalize() for word in inside.name.split("_"))
    test = Path("tests/unit") / inside.parent / f"{inside.name}_test.cpp"
    return {
        place.with_suffix(".hpp"): HEADER.format(purpose=purpose),
        place.with_suffix(".cpp"): SOURCE.format(header=header),
        test: TEST.format(header=header, name=name),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=tree.ROOT)
    parser.add_argument("place", type=Path, help="src/<folder>/<stem>.cpp")
    parser.add_argument("purpose", help="one sentence for the header's first comment")
    args = parser.parse_args()
    if not args.place.is_relative_to("src"):
        parser.error(f"{args.place} is not below src/")
    texts = new_files(args.place, args.purpose)
    taken = [place for place in texts if (args.root / place).exists()]
    if taken:
        parser.error(f"{taken[0]} exists already")
    for place, text in texts.items():
        (args.root / place).parent.mkdir(parents=True, exist_ok=True)
        (args.root / place).write_text(text)
        lists = place.parent / "CMakeLists.txt"
        print(f"wrote {place}" + ("" if place.suffix == ".hpp" else f"; list it in {lists}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
