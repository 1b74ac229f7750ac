# SPDX-License-Identifier: Apache-2.0
"""What render_results.py shows of a machine with GPUs about what its dispatch and combine could reach at best: the bytes
at the rate of the fastest way in which so many multiprocessors write to all peers (limits.MACHINE.json), and what a
call of few tokens takes beyond its bytes (case D). Rows are those of gpu_results.py."""

import gpu_results
from gpu_results import fastest, number

OPS = ("dispatch", "combine")
FEW_TOKENS = "d"


def links(all_results, machine):
    """{multiprocessors: % of the copy engines' rate} of the fastest way of writing to peers."""
    rows = all_results.get(f"limits.{machine}", {"rows": []})["rows"]
    reached = {}
    for row in rows:
        if row["op"] == "link" and "stores" in row["mode"]:
            reached[row["sms"]] = max(reached.get(row["sms"], 0), row["percent_of_limit"])
    return reached


def overhead(results, op, mode):
    """us of a call of few tokens beyond its bytes; None if it was not measured."""
    row = fastest([row for row in results["rows"] if row["op"] == op and row["mode"] == mode])
    return row and row["us_p50"] - row["limit_us"]


def line(case, row, percent, beyond):
    at_link = row["limit_us"] * 100 / percent
    least = at_link + beyond
    cells = [gpu_results.case_name(case), row["op"], number(row["sms"]), number(row["us_p50"], 1)]
    cells += [number(row["limit_us"], 1), number(percent), number(at_link, 1), number(beyond, 1), number(least, 1)]
    cells += [number(100 * row["limit_us"] / least), number(100 * least / row["us_p50"])]
    return "| " + " | ".join(cells) + " |"


def lines_of(all_results, machine):
    files = dict(gpu_results.files_of(all_results, machine))
    reached = links(all_results, machine)
    for case, results in files.items():
        if not gpu_results.is_reference(case) or case == FEW_TOKENS or FEW_TOKENS not in files:
            continue
        for row in gpu_results.chosen(case, results):
            beyond = overhead(files[FEW_TOKENS], row["op"], row["mode"]) if row["op"] in OPS else None
            if beyond is not None and row["sms"] in reached:
                yield line(case, row, reached[row["sms"]], beyond)


def summary(all_results, machine):
    """Markdown; empty if something is missing."""
    lines = list(lines_of(all_results, machine))
    if not lines:
        return ""
    header = ["case", "operation", "SMs", "p50 us", "copy engines: us", "stores reach, %", "by stores: us"]
    header += ["few tokens beyond their bytes: us", "together: us", "which is % of the limit", "% of that reached"]
    return "\n".join(["| " + " | ".join(header) + " |", "|---|---|" + "--:|" * 9, *lines])
