#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Renders bench/results/*.json into docs/results.md, docs/plots/*.svg and the marked parts of other documents.

A document quotes measurements only between these lines, FILE being the name of a results file without .json:

    <!-- results FILE -->
    <!-- end results -->

and between these what gpu_results.py shows of all files of a MACHINE, nothing if there are none yet:

    <!-- gpus MACHINE -->
    <!-- end gpus -->

and between these what bound_results.py does:

    <!-- bounds MACHINE -->
    <!-- end bounds -->
"""

import json
import os
import re
import sys
from xml.sax.saxutils import escape

import bound_results
import gpu_results
import overlap_results
import torch_results
import tree

MARKED = re.compile(r"<!-- results (\S+) -->\n.*?<!-- end results -->", re.S)
MARKED_GPUS = re.compile(r"<!-- gpus (\S+) -->\n.*?<!-- end gpus -->", re.S)
MARKED_BOUNDS = re.compile(r"<!-- bounds (\S+) -->\n.*?<!-- end bounds -->", re.S)
FIELDS = ["commit", "dirty", "date", "machine", "gpus", "driver", "cuda", "limit_gbps", "gather_gbps", "rows"]
BAR_HEIGHT, BAR_GAP, GROUP_GAP, LEFT, WIDTH, RIGHT = 18, 3, 16, 120, 520, 300
STYLE = """<style>
text { font: 13px sans-serif; fill: #24292f } .note { font-size: 11px }
.weft { fill: #0969da } .rival { fill: #afb8c1 } .limit { fill: #2da44e } .axis { stroke: #8c959f }
@media (prefers-color-scheme: dark) { text { fill: #d0d7de } .weft { fill: #58a6ff } .rival { fill: #57606a } }
</style>"""


def fail(text):
    sys.exit(f"render_results: {text}")


def load(path):
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        fail(f"{path} cannot be read ({error})")
    missing = [field for field in FIELDS if field not in results]
    if missing:
        fail(f"{path} lacks {', '.join(missing)}")
    return results


def number(value, digits=0):
    return "-" if value is None else f"{value:,.{digits}f}"


def gbps(row, key):
    return number(row[key] / row["us_p50"] / 1e3, 1) if row[key] else "-"


def times_faster(row):
    return row["rival"]["us_p50"] / row["us_p50"]


def case_text(row):
    if row["op"] in ("link", "signal"):  # between GPUs; moves no tokens
        return f"{row['ranks']} GPUs, {row['mode']}"
    padding = f" padded to {row['pad']}" if row["pad"] > 1 else ""
    return (
        f"{row['ranks']} ranks ({row['executor']}, {row['transport']}), {row['tokens']:,} tokens each, "
        f"hidden {row['hidden']:,}, {row['experts']} experts, top-{row['topk']}, {row['dtype']}, "
        f"{row['layout']}{padding}, {row['mode']}"
    )


def provenance(results):
    dirty = " with local changes" if results["dirty"] else ""
    gpus = f", {len(results['gpus'])} x {results['gpus'][0]}, CUDA {results['cuda']}" if results["gpus"] else ""
    limit = (
        f"copy engines move {number(results['limit_gbps'], 1)} GB/s out of each GPU while all send to all"
        if results["gpus"]
        else f"plain copies reach {number(results['limit_gbps'], 1)} GB/s scattering rows, "
        f"{number(results['gather_gbps'], 1)} GB/s gathering them"
    )
    return (
        f"Measured {results['date'][:10]} at commit `{results['commit'][:12]}`{dirty} on {results['machine']}{gpus}"
        f"{'; ' + limit if results['limit_gbps'] else ''}."
    )


def special_of(results):
    """The module that knows this kind of file; None: this one does."""
    if torch_results.is_torch(results):
        return torch_results
    return overlap_results if overlap_results.is_overlap(results) else None


def table(rows):
    has_rival = any("rival" in row for row in rows)
    has_sms = any(row["sms"] for row in rows)
    header = ["operation", *(["SMs"] if has_sms else []), "checked"]
    header += ["p50 us", "p99 us", "wire GB/s", "logical GB/s", "% of limit"]
    header += ["rival", "rival p50 us", "times faster"] if has_rival else []
    rule = "|---|" + ("--:|" if has_sms else "") + "---|" + "--:|" * 5 + ("---|--:|--:|" if has_rival else "")
    lines = ["| " + " | ".join(header) + " |", rule]
    for row in rows:
        cells = [
            row["op"],
            *([number(row["sms"])] if has_sms else []),
            "yes" if row["checked"] else "no",
            number(row["us_p50"]),
            number(row["us_p99"]),
            gbps(row, "wire_bytes"),
            gbps(row, "logical_bytes"),
            number(row["percent_of_limit"]),
        ]
        if has_rival:
            rival = "rival" in row
            cells += [row["rival"]["name"] if rival else "-"]
            cells += [number(row["rival"]["us_p50"]) if rival else "-", number(times_faster(row), 2) if rival else "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def by_case(rows):
    cases = {}
    for row in rows:
        cases.setdefault(case_text(row), []).append(row)
    return cases


def markdown(results):
    lines = [provenance(results)]
    if special := special_of(results):
        return "\n".join([*lines, special.markdown(results)])
    for case, rows in by_case(results["rows"]).items():
        lines += ["", case[0].upper() + case[1:] + ":", "", *table(rows)]
    return "\n".join(lines)


def bar(row):
    """(class, label, microseconds) of what a row says of Weft itself, of links, or of another library."""
    if row["op"] in ("link", "signal"):
        name = row["mode"]
    elif row["executor"] == "nccl":
        return "rival", f"NCCL, {row['mode']}", row["us_p50"]
    else:
        ways = {"graph": "Weft, as a graph", "copies": "Weft, by copy engines"}
        name = next((name for word, name in ways.items() if word in row["mode"]), "Weft")
    return "weft", name + (f", {row['sms']} SMs" if row["sms"] else ""), row["us_p50"]


def bars(results):
    """[(group, [(class, label, microseconds)])]: one group per case and operation, Weft first. Of rows that
    differ in their number of multiprocessors alone, the fastest."""
    fastest = {}
    for row in results["rows"]:
        key = case_text(row), row["op"]
        if key not in fastest or row["us_p50"] < fastest[key]["us_p50"]:
            fastest[key] = row
    groups = {key: [bar(row)] for key, row in fastest.items()}
    for row in results["rows"]:
        if "rival" in row:
            groups[case_text(row), row["op"]].append(("rival", row["rival"]["name"], row["rival"]["us_p50"]))
    return [(op, group) for (_, op), group in groups.items()]


def plot(groups):
    longest = max((us for _, group in groups for _, _, us in group), default=1) or 1
    body, y = [], 10
    for op, group in groups:
        body.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(op)}</text>')
        for kind, label, us in group:
            width = us / longest * WIDTH
            body.append(f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}"/>')
            text = f"{number(us)} us, {escape(label)}"
            body.append(f'<text class="note" x="{LEFT + width + 5:.1f}" y="{y + 13}">{text}</text>')
            y += BAR_HEIGHT + BAR_GAP
        y += GROUP_GAP
    body.append(f'<line class="axis" x1="{LEFT}" y1="4" x2="{LEFT}" y2="{y - GROUP_GAP + 4}"/>')
    size = f'width="{LEFT + WIDTH + RIGHT}" height="{y}" viewBox="0 0 {LEFT + WIDTH + RIGHT} {y}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', STYLE, *body, "</svg>", ""])


def results_page(all_results):
    lines = [
        "# Results",
        "",
        "Written by `tools/render_results.py` from the files in `bench/results/`; do not edit. Times are medians of the",
        "slowest rank; [benchmarks.md](benchmarks.md) says what the columns mean and how to measure again.",
    ]
    if not all_results:
        lines += ["", "Nothing is measured yet."]
    for name, results in all_results.items():
        lines += ["", f"## {name}", "", markdown(results), "", f"![{name}](plots/{name}.svg)"]
    return "\n".join(lines) + "\n"


def with_quotes(text, all_results, path):
    def quote(match):
        name = match.group(1)
        if name not in all_results:
            fail(f"{path} quotes {name}, but bench/results/{name}.json does not exist")
        return f"<!-- results {name} -->\n{markdown(all_results[name])}\n<!-- end results -->"

    def quote_gpus(match):
        machine = match.group(1)
        plot_path = os.path.relpath(gpu_plot(machine), path.parent)
        body = gpu_results.summary(all_results, machine, provenance, plot_path)
        return f"<!-- gpus {machine} -->\n{body + chr(10) if body else ''}<!-- end gpus -->"

    def quote_bounds(match):
        body = bound_results.summary(all_results, match.group(1))
        return f"<!-- bounds {match.group(1)} -->\n{body + chr(10) if body else ''}<!-- end bounds -->"

    text = MARKED_BOUNDS.sub(quote_bounds, text)
    return MARKED_GPUS.sub(quote_gpus, MARKED.sub(quote, text))


def gpu_plot(machine):
    return f"docs/plots/gpus.{machine}.svg"


def wanted_files(root):
    paths = sorted((root / "bench/results").glob("*.json"))
    all_results = {path.stem: load(path) for path in paths}
    wanted = {root / "docs/results.md": results_page(all_results)}
    for name, results in all_results.items():
        special = special_of(results)
        groups = special.bars(results) if special else bars(results)
        wanted[root / f"docs/plots/{name}.svg"] = plot(groups)
    for path in sorted([*root.glob("*.md"), *root.glob("docs/*.md")]):
        text = path.read_text()
        if path not in wanted and any(marked.search(text) for marked in (MARKED, MARKED_GPUS, MARKED_BOUNDS)):
            wanted[path] = with_quotes(text, all_results, path.relative_to(root))
            for machine in MARKED_GPUS.findall(text):
                groups = gpu_results.bars(all_results, machine)
                wanted.update({root / gpu_plot(machine): plot(groups)} if groups else {})
    return wanted


def main():
    parser = tree.parser(__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="report what is out of date, write nothing")
    args = parser.parse_args()
    root = args.root.resolve()
    wanted = wanted_files(root)
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    stale += [path for path in sorted((root / "docs/plots").glob("*.svg")) if path not in wanted]
    if args.check:
        findings = [f"{path.relative_to(root)}: differs from bench/results" for path in stale]
        return tree.report("render_results", findings, "every quoted number is in bench/results")
    for path in stale:
        if path in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
        else:
            path.unlink()
        print(f"{'wrote' if path in wanted else 'removed'} {path.relative_to(root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
