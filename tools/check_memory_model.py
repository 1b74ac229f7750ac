#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks docs/memory_model.md against the source: every ordering access and fence stands in its table of ends, with the
hand-overs that it serves, and every hand-over has a release and an acquire. What the caller releases has no end here.

Its table of models names every model of tests/model with the mutations that the model's head lists, and no others.

An end is a use of one of the primitives below in a function of a watched file. A new one fails until the table has it.
"""

import re
import sys
from collections import Counter

import tree

DOCUMENT = "docs/memory_model.md"
DEVICE = [
    *["store_relaxed_sys", "store_release_sys", "load_acquire_sys", "load_acquire_gpu", "load_relaxed_sys"],
    *["add_acq_rel_gpu", "fence_sys", "fence_gpu", "fence_async_proxy", "bulk_load", "bulk_store", "wait_stores_read"],
    *["fence_async_proxy_shared", "wait_stores", "arrive", "init_barrier", "publish_barriers", "try_wait_barrier"],
    *["wait_barrier", "wait_reached", "wait_reached_warp", "report_progress", "signal_chunks", "atomicMax", "volatile"],
    *["atomicExch", "atomicOr", "__threadfence_block", "__threadfence", "__threadfence_system"],
]
HOST = ["memory_order_release", "memory_order_acquire", "memory_order_acq_rel", "memory_order_seq_cst", "volatile", "write_word"]
WATCHED = [  # (pattern of paths, primitives); the inline PTX that defines the primitives is left out
    (re.compile(r"^src/(cuda|hosts)/(?!device/ptx/).*\.cuh?$"), DEVICE),
    (re.compile(r"^src/(cpu|cuda|exchange|hosts|survive|transport/(mapped|ofi))/.*\.[ch]pp$"), HOST),
]
MODELS = "tests/model"
MUTATION = re.compile(r"^//   ([A-Z_]+)  ", re.M)
NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|^[ \t]*#[^\n]*', re.S | re.M)
BLOCK = re.compile(r"^(?:else\b|do\b|(?:if|for|while|switch|catch)\b)")
CALLED = re.compile(r"([A-Za-z_]\w*)\s*\(")
NOT_A_NAME = {"__launch_bounds__", "__align__", "alignas", "decltype", "volatile", "asm", "constexpr"}
ROW = re.compile(r"^\|(.*)\|$", re.M)


def name_of_scope(head):
    """The function that a brace after `head` opens; None for other blocks, lambdas and types included."""
    head = re.sub(r"\[\[\w+\]\]|\b(?:public|private|protected):|template\s*<[^{}]*?>\s*(?=[\w_\[])", " ", head).strip()
    is_other = r"\[[&=\w, ]*\]\s*(?:\(|$)|^(?:struct|class|union|enum|namespace)\b|=\s*$|\breturn\b"
    if BLOCK.match(head) or re.search(is_other, head):
        return None
    return next((name for name in CALLED.findall(head) if name not in NOT_A_NAME), None)


def uses(text, primitives):
    """{(function, primitive): number of uses}"""
    found, scopes, begin = Counter(), [], 0
    pattern = re.compile(r"[{};]|(?<![\w.])(?<!asm )(?:" + "|".join(primitives) + r")\b")
    clean = NOISE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)  # lines stay where they are
    for match in pattern.finditer(clean):
        token = match.group()
        if token == "{":
            scopes.append(name_of_scope(clean[begin : match.start()]))
        elif token == "}":
            scopes = scopes[:-1]
        elif token != ";":
            function = next((name for name in reversed(scopes) if name), None)
            if function and function != token:
                found[function, token] += 1
            continue
        begin = match.end()
    return found


def uses_in_tree(root):
    found = {}
    for path in tree.files(root, ".cuh", ".cu", ".hpp", ".cpp"):
        place = path.relative_to(root).as_posix()
        for pattern, primitives in WATCHED:
            if pattern.match(place):
                for (function, primitive), count in uses(path.read_text(), primitives).items():
                    found.setdefault((place, function), {})[primitive] = count
    return found


def tables(text):
    """[{column: cell}] of all tables of a document."""
    rows, header = [], None
    for line in text.splitlines():
        match = ROW.match(line)
        if not match:
            header = None
            continue
        cells = [cell.strip() for cell in match.group(1).split("|")]
        if header is None:
            header = cells
        elif not set(line) <= set("|-: "):
            rows.append(dict(zip(header, cells)))
    return rows


def ids(cell):
    return re.findall(r"[a-z]+(?:-[a-z]+)*", cell)


def counted(cell):
    """{primitive: count} of '`a`, `b` x 2'."""
    return {name: int(count or 1) for name, count in re.findall(r"`(\w+)`(?: x (\d+))?", cell)}


def shown(primitives):
    return ", ".join(f"`{name}` x {n}" if n > 1 else f"`{name}`" for name, n in sorted(primitives.items()))


def compare_models(root, rows, hand_overs):
    """Findings of the table that says which model checks which hand-overs."""
    found = {(path.stem, name) for path in tree.files(root / MODELS, ".pml") for name in MUTATION.findall(path.read_text())}
    told, findings = set(), []
    for row in [row for row in rows if "model" in row]:
        model, unknown = row["model"].strip("`"), set(ids(row["hand-over"])) - set(hand_overs)
        told |= {(model, name) for name in re.findall(r"`(\w+)`", row["mutations that must be found"])}
        findings += [f"{DOCUMENT}: model `{model}` names {one}, which no row explains" for one in sorted(unknown)]
    for model, name in sorted(found ^ told):
        findings.append(f"{MODELS}/{model}.pml: {name} stands in the {'document' if (model, name) in told else 'model'} alone")
    return findings


def compare(root):
    rows = tables((root / DOCUMENT).read_text())
    hand_overs = [row["id"].strip("`") for row in rows if "id" in row]
    of_caller = {row["id"].strip("`") for row in rows if row.get("released by", "").startswith("the caller's ")}
    ends, served, findings = {}, {"release": of_caller, "acquire": set()}, []
    for row in [row for row in rows if "function" in row]:
        key = (row["file"].strip("`"), row["function"].strip("`"))
        name = f"{DOCUMENT}: {key[0]}: {key[1]}"
        findings += [f"{name} stands there twice"] if key in ends else []
        ends[key] = counted(row["what stands there"])
        of_row = ids(row["releases"]) + ids(row["acquires"])
        served["release"].update(ids(row["releases"]))
        served["acquire"].update(ids(row["acquires"]))
        findings += [] if of_row else [f"{name} serves no hand-over"]
        findings += [f"{name} names {one}, which no row explains" for one in of_row if one not in hand_overs]
    findings += [f"{DOCUMENT}: {one} has no {half}" for one in hand_overs for half, at in served.items() if one not in at]
    findings += compare_models(root, rows, hand_overs)
    found = uses_in_tree(root)
    for key in sorted(found.keys() | ends.keys()):
        told, there = shown(ends.get(key, {})) or "nothing", shown(found.get(key, {})) or "nothing"
        if told != there:
            findings.append(f"{key[0]}: {key[1]} has {there}, the document says {told}")
    return findings, f"{len(hand_overs)} hand-overs, {len(ends)} ends, all paired"


def main():
    parser = tree.parser(__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the ends in the source as rows of the table")
    args = parser.parse_args()
    root = args.root.resolve()
    if not args.list:
        return tree.report("check_memory_model", *compare(root))
    for (place, function), primitives in sorted(uses_in_tree(root).items()):
        print(f"| `{place}` | `{function}` | {shown(primitives)} | | |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
