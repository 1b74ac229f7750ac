# SPDX-License-Identifier: Apache-2.0
"""What render_results.py shows of a machine with GPUs in short: the best of each reference case, beside its limit and
NCCL. The files of one machine are bench/results/gpu-CASE.MACHINE.json and nccl.MACHINE.json. A CASE is a letter, for a
variant with a dash and its name behind."""

OPS = ["plan", "dispatch", "combine", "plan+dispatch"]
BOUNDS = [48, 24]  # multiprocessors that a call may take where others compute beside it
USUAL_WAY = "one row per route"
SHAPE = ["ranks", "tokens", "hidden", "experts", "topk", "dtype"]


def number(value, digits=0):
    return "-" if value is None else f"{value:,.{digits}f}"


def fastest(rows):
    return min(rows, key=lambda row: row["us_p50"], default=None)


def files_of(all_results, machine):
    """[(case, results)] of the cases that are measured, by name."""
    found = []
    for name, results in sorted(all_results.items()):
        case, _, of_machine = name.partition(".")
        is_case = any(row["op"] in OPS and row["executor"] == "cuda" for row in results["rows"])
        if of_machine == machine and case.startswith("gpu-") and is_case:
            found.append((case.removeprefix("gpu-"), results))
    return sorted(found, key=lambda one: (not is_reference(one[0]), one[0]))


def is_reference(case):
    """Not a variant, whose routing or layout may be another than NCCL's."""
    return "-" not in case


def case_name(case):
    letter, _, variant = case.partition("-")
    return letter.upper() + (f", {variant.replace('-', ' ')}" if variant else "")


def rivals(all_results, machine, case, row):
    """NCCL on the same shape: the usual way, and the fastest of all ways; None if not measured."""
    if not is_reference(case):
        return None, None
    rows = all_results.get(f"nccl.{machine}", {"rows": []})["rows"]
    same = [
        other
        for other in rows
        if other["executor"] == "nccl" and other["op"] == row["op"] and all(other[key] == row[key] for key in SHAPE)
    ]
    return fastest([other for other in same if other["mode"] == USUAL_WAY]), fastest(same)


def chosen(case, results):
    """The fastest row of each operation and mode, and of dispatch and combine of a reference case within each bound."""
    found = []
    for op in OPS:
        rows = [row for row in results["rows"] if row["op"] == op and row["executor"] == "cuda"]
        for mode in sorted({row["mode"] for row in rows}, reverse=True):
            found.append(fastest([row for row in rows if row["mode"] == mode]))
        if op in ("dispatch", "combine") and is_reference(case):
            for bound in BOUNDS:
                row = fastest([row for row in rows if 0 < row["sms"] <= bound and "graph" not in row["mode"]])
                found += [row] if row is not None and row not in found else []
    return found


def line(case, row, usual, any_way):
    def rival(other):
        return [number(other["us_p50"] if other else None), number(other["us_p50"] / row["us_p50"] if other else None, 2)]

    cells = [case_name(case), row["op"], row["mode"], number(row["sms"]) if row["sms"] else "default"]
    cells += ["yes" if row["checked"] else "no", number(row["us_p50"], 1), number(row["limit_us"], 1)]
    cells += [number(row["percent_of_limit"]), *rival(usual), *rival(any_way)]
    return "| " + " | ".join(cells) + " |"


def shape_text(case, row):
    return (
        f"{case_name(case)} = {row['tokens']:,} tokens on each of {row['ranks']} GPUs, hidden {row['hidden']:,}, "
        f"{row['experts']} experts, top-{row['topk']}, {row['dtype']}"
    )


def summary(all_results, machine, provenance, plot_path):
    """Markdown; empty if nothing of the machine is measured."""
    files = files_of(all_results, machine)
    if not files:
        return ""
    shapes = [shape_text(case, results["rows"][0]) for case, results in files if is_reference(case)]
    others = {results["commit"][:12] for _, results in files} - {files[0][1]["commit"][:12]}
    also = f" Some cases were measured at {', '.join(f'`{one}`' for one in sorted(others))}." if others else ""
    nccl = all_results.get(f"nccl.{machine}")
    if nccl and nccl["commit"][:12] != files[0][1]["commit"][:12]:
        also += f" NCCL was measured in another run, with the benchmark of `{nccl['commit'][:12]}`."
    lines = [provenance(files[0][1]) + also, "", "; ".join(shapes) + ".", ""]
    lines.append(
        "| case | operation | mode | SMs | checked | p50 us | limit us | % of limit "
        f"| NCCL, {USUAL_WAY}: us | times faster | fastest NCCL way: us | times faster |"
    )
    lines.append("|---|---|---|--:|---|" + "--:|" * 7)
    for case, results in files:
        lines += [line(case, row, *rivals(all_results, machine, case, row)) for row in chosen(case, results)]
    return "\n".join([*lines, "", f"![{machine}]({plot_path})"])


def bars(all_results, machine):
    """[(group, [(class, label, microseconds)])] for dispatch and combine of each reference case."""
    groups = []
    for case, results in files_of(all_results, machine):
        if not is_reference(case):
            continue
        for op in ("dispatch", "combine"):
            best = fastest([row for row in results["rows"] if row["op"] == op and row["executor"] == "cuda"])
            if best is None:
                continue
            sms = f", {best['sms']} SMs" if best["sms"] else ""
            group = [("weft", f"Weft{sms}", best["us_p50"])]
            if best["limit_us"]:
                group.append(("limit", "limit of the links", best["limit_us"]))
            usual, any_way = rivals(all_results, machine, case, best)
            if usual:
                group.append(("rival", f"NCCL, {USUAL_WAY}", usual["us_p50"]))
            if any_way and any_way is not usual:
                group.append(("rival", f"NCCL, {any_way['mode']}", any_way["us_p50"]))
            groups.append((f"{case_name(case)} {op}", group))
    return groups
