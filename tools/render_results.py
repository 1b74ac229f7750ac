#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fills the tables of measured times in the documents from the files in bench/results, and checks that they still agree.

A table stands between two lines, `<!-- KIND NAME -->` and `<!-- end KIND -->`, in README.md or docs/*.md. The kinds are
  results  all rows of one run, for instance vs-mpi.xeon-2core
  gpus     the fastest of each case of a machine, for instance 4xh200, beside NCCL
  bounds   what the dispatch and combine of that machine could reach at best
  peers    Weft beside other libraries on that machine (bench/results/peers)
  doors    calls under other libraries' names, of the GPU and of the host, beside those libraries

A file in bench/results maps names of runs to runs. A benchmark writes one run to one file; this tool moves such a run,
say gpu-a.4xh200.json, into the file of its subject and machine, gpu.4xh200.json.
"""

import json
import re
import sys
import textwrap

import tree

BLOCK = re.compile(r"<!-- (results|gpus|bounds|peers|doors) (\S+) -->\n.*?<!-- end \1 -->", re.S)
SUBJECTS = ["balance", "domains", "doors", "gpu", "hosts", "relays", "shrink", "steps", "torch"]  # of several runs; names begin with it
NONE = "-"
USUAL_WAY = "one row per route"
OPS = ["plan", "dispatch", "combine", "plan+dispatch"]
BOUNDS = [48, 24]  # multiprocessors that a call may take where others compute at the same time
SHAPE = ["ranks", "tokens", "hidden", "experts", "topk"]
CASES = {(4096, 7168, 256, 8): "A", (8192, 2048, 128, 8): "B", (4096, 4096, 8, 2): "C", (128, 7168, 256, 8): "D"}

# Columns of tables: {header: key of the row} for text, {header: (key, digits[, factor])} for numbers.
CALL = {"operation": "op", "SMs": ("sms", 0), "checked": "checked", "p50 us": ("us_p50", 0), "p99 us": ("us_p99", 0)}
CALL |= {"wire GB/s": ("wire_gbps", 1), "logical GB/s": ("logical_gbps", 1), "% of limit": ("percent_of_limit", 0)}
CALL |= {"rival": "rival", "rival p50 us": ("rival_us", 0), "times faster": ("times", 2)}
PYTHON = {"operation": "op", "mode": "mode", "p50 us": ("us_p50", 0), "p99 us": ("us_p99", 0)}
LAYER = {"dispatcher": "mode", "p50 us": ("us_p50", 0), "p99 us": ("us_p99", 0), "forward us": ("forward_us_p50", 0)}
LAYER |= {"backward us": ("backward_us_p50", 0), "times faster than alltoall": ("times", 2)}
LAYER |= {"peak GiB": ("peak_bytes", 2, 2**-30), "without parameters and gradients": ("other_bytes", 2, 2**-30)}
LAYER |= {"exchange beside it, GiB": ("exchange_bytes", 2, 2**-30)}
STORM = {key: (key, 0) for key in ("storms", "deaths", "killed", "stopped", "left", "masked", "returned", "wrong", "hung")}
DEATH = {key: (key, 0) for key in ("ranks", "deaths", "wrong", "hung")} | {"p50 ms": ("ms_p50", 0), "p99 ms": ("ms_p99", 0)}
RETURN = {key: (key, 0) for key in ("ranks", "readmissions", "wrong", "hung")} | {"p50 ms": ("ms_p50", 0), "p99 ms": ("ms_p99", 0)}
COST = {"case": "case", "samples": ("samples", 0), "without, p50 us": ("us_p50_fail", 0), "with, p50 us": ("us_p50", 0)}
COST |= {"more, us": ("more_us", 1), "more, %": ("more_percent", 2)}
RELAYS = {"replicas": ("replicas", 0), "relays": "mode", "rounds": ("rounds", 0), "busiest rank, MB": ("busiest_bytes", 0, 1e-6)}
RELAYS |= {"of another domain, MB": ("busiest_crossing_bytes", 0, 1e-6), "p50 ms": ("us_p50", 1, 1e-3), "p99 ms": ("us_p99", 1, 1e-3)}
PRODUCT = {"product": "product", "type": "dtype", "inner size": ("inner", 0), "outer size": ("outer", 0)}
PRODUCT |= {"same bits from so many rows on": ("rows_from", 0), "at another place": "moves", "beside other experts' rows": "beside"}
VLLM = {"way": "mode", "asked": "task", "prompts": ("prompts", 0), "same prompts": ("same_prompts", 0), "tokens": ("tokens", 0)}
VLLM |= {"before they part": ("same_tokens", 0), "log-probabilities bit for bit": ("same_bits", 0), "largest difference": ("largest", 3)}
VLLM |= {"near ties": ("near_ties", 0), "differences": ("differences", 0), "an engine late, s": ("late_s", 1)}
VLLM |= {"prefill, tokens/s": ("prefill_tps", 0), "decode, tokens/s": ("decode_tps", 0), "beside a killed engine": "killed"}
STEP = {"mode": "mode", "s/step": ("seconds", 4), "times faster": ("ratio", 2)}
STEP |= {"exchange, % of step": ("exchange_of_step", 1, 100), "moving, % of step": ("moving_of_step", 1, 100)}
STEP |= {"exposed, % of exchange": ("exposed_of_exchange", 1, 100), "% of step": ("exposed_of_step", 1, 100)}
STEP |= {"idle, % of step": ("idle_of_step", 1, 100), "busiest rank, of mean": ("busiest_of_mean", 2), "peak GiB": ("peak_gib", 1)}
SHARES = ["exchange_of_step", "moving_of_step", "exposed_of_exchange", "exposed_of_step", "idle_of_step"]
OVERLAP = {"exchange": "op", "SMs": ("sms", 0), "alone, us": ("quiet_us", 0), "beside products, us": ("us_p50", 0)}
OVERLAP |= {"products slower by, %": ("slowdown", 1, 100), "costs, us": ("cost_us", 0)}
GPUS = {"case": "case", "operation": "op", "mode": "mode", "SMs": ("sms", 0), "checked": "checked"}
GPUS |= {"p50 us": ("us_p50", 1), "limit us": ("limit_us", 1), "% of limit": ("percent_of_limit", 0)}
GPUS |= {f"NCCL, {USUAL_WAY}: us": ("usual_us", 0), "times faster": ("usual_times", 2)}
GPUS |= {"fastest NCCL way: us": ("nccl_us", 0), "times faster than that": ("nccl_times", 2)}
BOUND = {"case": "case", "operation": "op", "SMs": ("sms", 0), "p50 us": ("us_p50", 1)}
BOUND |= {"copy engines: us": ("limit_us", 1), "stores reach, %": ("reached", 0), "by stores: us": ("at_link", 1)}
BOUND |= {"few tokens beyond their bytes: us": ("beyond", 1), "together: us": ("least", 1)}
BOUND |= {"which is % of the limit": ("least_of_limit", 0), "% of that reached": ("reached_of_least", 0)}
DOORS = {"case": "case", "call": "op", "rows": "dtype", "SMs": ("sms", 0), "GPU, in a graph: us": ("graph_us", 1)}
DOORS |= {"one of eight in a graph: us": ("graph8_us", 1), "GPU, eager: us": ("us_p50", 1)}
DOORS |= {"host: us": ("host_us_p50", 0), "wait for a number of rows: us": ("wait_us", 0)}
DOORS |= {"GPU items": ("gpu_items", 0), "other library": "rival", "its GPU: us": ("rival_us", 1), "its host: us": ("rival_host_us", 0)}
PARTS = {"case": "case", "call": "op", "rows": "dtype", "host: us": ("host_us", 0), "launches": ("launches_us", 0)}
PARTS |= {"outputs": ("outputs_us", 0), "events and streams": ("events_us", 0)}


def run_of(runs, name):
    return runs[name] if name in runs else sys.exit(f"render_results: a document quotes {name}, which bench/results does not have")


def cell(row, column):
    key, *how = [column] if isinstance(column, str) else column
    value = row.get(key)
    if value in (None, "") or (key == "sms" and not value):
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value * (how[1:] or [1])[0]:,.{how[0]}f}" if how else value


def table(columns, rows):
    """Lines of Markdown; columns of which nothing is known are left out."""
    filled = [(header, column, [cell(row, column) for row in rows]) for header, column in columns.items()]
    filled = [one for one in filled if set(one[2]) != {NONE}]
    lines = ["| " + " | ".join(header for header, _, _ in filled) + " |"]
    lines.append("|" + "".join("---|" if isinstance(column, str) else "--:|" for _, column, _ in filled))
    return lines + ["| " + " | ".join(cells) + " |" for cells in zip(*(cells for _, _, cells in filled))]


def fastest(rows):
    return min(rows, key=lambda row: row["us_p50"], default=None)


def provenance(run):
    gpus = f", {len(run['gpus'])} x {run['gpus'][0]}, CUDA {run['cuda']}" if run["gpus"] else ""
    of_cpus = f"plain copies reach {run['limit_gbps']:,.1f} GB/s scattering rows, {run['gather_gbps']:,.1f} GB/s gathering them"
    of_gpus = f"copy engines move {run['limit_gbps']:,.1f} GB/s out of each GPU while all send to all"
    dirty = " with local changes" if run["dirty"] else ""
    where = f"`{run['commit'][:12]}`{dirty} on {run['machine']}{gpus}"
    return f"Measured {run['date'][:10]} at commit {where}{'; ' + (of_gpus if gpus else of_cpus) if run['limit_gbps'] else ''}."


def shape(row):
    sizes = f"{row['tokens']:,} tokens each, hidden {row['hidden']:,}, {row['experts']} experts, top-{row['topk']}"
    return f"{sizes}, {row['dtype']}"


def step_heading(run):
    model = run["shape"]
    name = "hidden {hidden:,}, {experts} experts, top-{topk}, width {width:,}".format(**model)
    if [model[key] for key in ("hidden", "experts", "topk", "width")] == [2048, 128, 8, 768]:
        name = "Qwen3-30B-A3B"
    batches = f"{run['micro_batches']} micro-batches of {model['sequences']} x {model['sequence']:,} tokens on each"
    routing = ", experts at random" if run.get("balanced") else ""
    copies = {"auto": "", "never": ", no copy engines", "always": ", by copy engines beside computation"}
    how = routing + copies[run.get("exchange_copies", "auto")]
    return f"{model['layers']} layers of {name} on {run['ranks']} GPUs, {batches}{how}"


def kind_of(row, run):
    """(heading, columns, the row as they show it)"""
    if row["op"] == "train_step":
        row = dict(row)
        if run.get("exchange_copies", "never") != "never" and "overlap" in row["mode"] and not run.get("exposed_has_copies"):
            # Copy engines carried rows, and the trace of the step was not searched for copies.
            row |= dict.fromkeys(SHARES)
        elif row["exposed_of_exchange"]:
            row.setdefault("exchange_of_step", row["exposed_of_step"] / row["exposed_of_exchange"])
        return step_heading(run), STEP, row
    if row["op"] == "storm":
        return f"Storms of 2 to 8 ranks ({row['executor']}, {row['transport']})", STORM, row
    if row["op"] == "death":
        replayed = ", replayed graphs" if row.get("mode") == "graph" else ""
        return f"From a death to the end of the call on all others ({row['executor']}, {row['transport']}{replayed})", DEATH, row
    if row["op"] == "readmission":
        replayed = ", replayed graphs" if row.get("mode") == "graph" else ""
        heading = "From a new process's call of rejoin to the end of the first call with it on all ranks"
        return f"{heading} ({row['executor']}, {row['transport']}{replayed})", RETURN, row
    if row["op"] == "shrink_cost":
        ranks = f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''} ({row['executor']}, {row['transport']})"
        return f"Plan, dispatch and combine while nobody dies, {ranks}, {shape(row)}", COST, row
    if row["op"] == "push_weights":
        where = f"{row['ranks']} ranks in {row['domains']} domain{'s' if row['domains'] > 1 else ''} ({row['executor']}, {row['transport']})"
        return f"An expert of {row['expert_bytes'] / 1e6:,.0f} MB from one of {where}", RELAYS, row
    if row["op"] == "product_rows":
        return f"Rows of experts' products, alone and among others ({row['executor']}, torch {run['torch']})", PRODUCT, row
    if row["op"] == "vllm":
        return f"A whole vLLM on two GPUs, tokens against those of `{row['against']}`", VLLM, row
    if row["op"] in ("link", "signal"):  # between GPUs; moves no tokens
        return f"{row['ranks']} GPUs, {row['mode']}", CALL, row
    rival = row.get("rival", {"name": None, "us_p50": None})
    times = rival["us_p50"] and rival["us_p50"] / row["us_p50"]
    row = row | {"rival": rival["name"], "rival_us": rival["us_p50"], "times": times}
    case, of_gpus = f"Case {row['case']}" if "case" in row else "", f"{row['ranks']} GPUs, {shape(row)}"
    if row["op"] == "moe_layer":
        row |= {"mode": row["mode"].partition(",")[0], "other_bytes": row["peak_bytes"] - row.get("parameter_bytes", 0)}
        return f"{case}{case and ', '}MoE layer, forward and backward: {of_gpus}", LAYER, row
    if row["mode"] == "beside products":
        return f"{case}: {of_gpus}", OVERLAP, row
    if row["mode"].startswith("python "):
        heading = f"{case}{case and ', '}calls from Python: {of_gpus}"
        return heading[0].upper() + heading[1:], PYTHON, row | {"mode": row["mode"].removeprefix("python ")}
    for key in ("wire", "logical"):
        row[f"{key}_gbps"] = row[f"{key}_bytes"] / row["us_p50"] / 1e3 or None
    padding = f" padded to {row['pad']}" if row["pad"] > 1 else ""
    ranks = f"{row['ranks']} ranks ({row['executor']}, {row['transport']})"
    return f"{ranks}, {shape(row)}, {row['layout']}{padding}, {row['mode']}", CALL, row


def results_block(runs, name):
    run = run_of(runs, name)
    groups, lines = {}, [provenance(run)]
    for row in run["rows"]:
        heading, columns, row = kind_of(row, run)
        groups.setdefault(heading, (columns, []))[1].append(row)
    for heading, group in groups.items():
        lines += ["", f"{heading}:", "", *table(*group)]
    return lines


def cases_of(runs, machine):
    """{case: run} of gpu-CASE.MACHINE; reference cases, which are letters, before their variants, which have a dash."""
    names = [name for name in runs if name.startswith("gpu-") and name.endswith(f".{machine}")]
    found = {name.split(".")[0].removeprefix("gpu-"): runs[name] for name in names}
    return dict(sorted(found.items(), key=lambda one: ("-" in one[0], one[0])))


def chosen(case, run):
    """The fastest row of each operation and mode, and within each bound where calls are long. Graphs where they are short."""
    letter, _, variant = case.partition("-")
    name = {"case": letter.upper() + (f", {variant.replace('-', ' ')}" if variant else "")}
    is_long = case in ("a", "b", "c")
    found = []
    for op in OPS:
        rows = [name | row for row in run["rows"] if row["op"] == op and not (is_long and "graph" in row["mode"])]
        for mode in sorted({row["mode"] for row in rows}, reverse=True):
            found.append(fastest(row for row in rows if row["mode"] == mode))
        for bound in BOUNDS if is_long and op in ("dispatch", "combine") else []:
            row = fastest(row for row in rows if 0 < row["sms"] <= bound)
            found += [row] if row is not None and row not in found else []
    return found


def with_nccl(runs, machine, row):
    """With NCCL on the same shape: the usual way, and the fastest of all ways."""
    rows = runs.get(f"nccl.{machine}", {"rows": []})["rows"] if len(row["case"]) == 1 else []
    same = [one for one in rows if one["executor"] == "nccl" and all(one[key] == row[key] for key in [*SHAPE, "op", "dtype"])]
    for key, rival in ("usual", fastest(one for one in same if one["mode"] == USUAL_WAY)), ("nccl", fastest(same)):
        if rival:
            row = row | {f"{key}_us": rival["us_p50"], f"{key}_times": rival["us_p50"] / row["us_p50"]}
    return row


def gpus_block(runs, machine):
    cases = cases_of(runs, machine)
    if not cases:
        return []
    first = next(iter(cases.values()))
    others = sorted({run["commit"][:12] for run in cases.values()} - {first["commit"][:12]})
    also = f" Some cases were measured at {', '.join(f'`{one}`' for one in others)}." if others else ""
    nccl = runs.get(f"nccl.{machine}", first)["commit"][:12]
    also += f" NCCL was measured with the benchmark of `{nccl}`." if nccl != first["commit"][:12] else ""
    shapes = [f"{case.upper()} = {shape(run['rows'][0])}" for case, run in cases.items() if "-" not in case]
    rows = [with_nccl(runs, machine, row) for case, run in cases.items() for row in chosen(case, run)]
    return [provenance(first) + also, "", "; ".join(shapes) + ".", "", *table(GPUS, rows)]


def bounds_block(runs, machine):
    """The bytes of each call at the rate of the fastest way in which so many multiprocessors write to all peers, and what a
    call of few tokens (case D) takes beyond its bytes."""
    reached, rows, cases = {}, [], cases_of(runs, machine)
    for row in runs.get(f"limits.{machine}", {"rows": []})["rows"]:
        if row["op"] == "link" and "stores" in row["mode"]:
            reached[row["sms"]] = max(reached.get(row["sms"], 0), row["percent_of_limit"])
    for row in [row for case in "abc" if case in cases and "d" in cases for row in chosen(case, cases[case])]:
        few = fastest(one for one in cases["d"]["rows"] if one["op"] == row["op"] and one["mode"] == row["mode"])
        if row["op"] in ("dispatch", "combine") and few and row["sms"] in reached:
            row |= {"reached": reached[row["sms"]], "beyond": few["us_p50"] - few["limit_us"]}
            row["at_link"] = row["limit_us"] * 100 / row["reached"]
            row["least"] = row["at_link"] + row["beyond"]
            row |= {"least_of_limit": 100 * row["limit_us"] / row["least"], "reached_of_least": 100 * row["least"] / row["us_p50"]}
            rows.append(row)
    return table(BOUND, rows) if rows else []


def call_key(row, op, is_short):
    """Key of rows that can be compared: shape, type, operation, whether rows are sorted by expert, whether tokens are few."""
    return tuple(row[key] for key in SHAPE), row["dtype"], op, row["layout"] != "rank_major", is_short


def peers_block(runs, machine):
    rows, mine, modes, measured, peers = {}, {}, {}, {}, run_of(runs, f"peers.{machine}")
    for row in peers["rows"]:
        op, is_short = row["op"].split("_")[-1], "low latency" in row["mode"] or row["mode"] == "graph"
        if op == "dispatch" and (is_short or row["mode"] == "exact"):
            op = "plan+dispatch"  # for few tokens, or exact: these make their plans themselves
        if op in OPS:
            rows.setdefault(call_key(row, op, is_short), {}).setdefault(row["executor"], []).append(row)
            modes.setdefault(row["executor"], {}).update({row["mode"]: True} if row["mode"] else {})
    for case, run in cases_of(runs, machine).items():
        for row in run["rows"] if case in [*"abcd", "a-fp8", "d-fp8", "a-plan", "a-rank-major"] else []:
            key = call_key(row, row["op"], "graph" in row["mode"])
            if key in rows and row["mode"] in ("exact direct", "budget graph direct"):
                mine.setdefault(key, []).append(row)
                measured.setdefault(run["date"][:10], {})[f"`{run['commit'][:12]}`"] = True

    def time(found):
        best = fastest(found)
        return NONE if best is None else f"{best['us_p50']:,.0f}" + (f" ({best['sms']})" if best.get("sms") else "")

    lines = []
    for key in sorted(rows, key=lambda key: (CASES.get(key[0][1:], "Z"), key[1] == "fp8", key[2] == "combine", not key[3])):
        case = CASES.get(key[0][1:], "{:,} x {:,}".format(*key[0][1:3])) + (", FP8" if key[1] == "fp8" else "")
        line = {"case": case, "operation": key[2], "rows lie": "by expert" if key[3] else "by rank"}
        line["**Weft**"] = time(mine.get(key, []))
        line["Weft on 24"] = time(row for row in mine.get(key, []) if 0 < row["sms"] <= BOUNDS[-1])
        lines.append(line | {name: time(rows[key].get(name, [])) for name in modes})
    days = [f"{day} ({', '.join(commits)})" for day, commits in measured.items()]
    when = f"Weft was measured {' and '.join(days)}." if days else "Weft is not measured yet."
    short = " Where there are few tokens, Weft's calls are replayed as a graph." if any(key[4] for key in rows) else ""
    head = f"Times in us, with the number of multiprocessors where it is known. {when}{short} {peers['about']}"
    ran = "; ".join(f"{name} ({' / '.join(found)})" for name, found in modes.items() if found)
    dash = "A dash stands where nothing was measured or there is no such call; of several ways of a library its fastest counts"
    return [head, "", *table({header: header for header in lines[0]}, lines), "", f"{dash}. How each was run: {ran}."]


def doors_block(runs, machine):
    """A line for each call of each case and type of rows, and where a profiler sees the time of its host."""
    run, found = run_of(runs, f"doors.{machine}"), {}
    parts = [row for row in run["rows"] if row["mode"] == "profiled"]
    peers = runs.get(f"peers.{machine}", {"rows": []})["rows"]
    for row in run["rows"]:
        key = row["case"], row["op"], row["dtype"]
        if row["mode"] == "eager":
            found[key] = row | {"wait_us": row["host_wait_us_p50"] or None, "rival": None}
        elif row["mode"] in ("graph1", "graph"):
            found[key]["graph_us" if row["mode"] == "graph1" else "graph8_us"] = row["us_p50"]
    for row in found.values():
        for peer in peers:
            if all(peer[one] == row[one] for one in [*SHAPE, "op", "dtype"]):
                row |= {"rival": peer["executor"], "rival_us": peer["us_p50"], "rival_host_us": peer["host_us_p50"]}
    lines = [provenance(run), "", *table(DOORS, list(found.values()))]
    head = "The host under a profiler, which lengthens it, and what of that are launches, outputs of torch's allocator, and events:"
    return [*lines, *(["", head, "", *table(PARTS, parts)] if parts else [])]


def load_runs(root):
    """({name: run}, {path: text as it should be, None for a file that moves into another})"""
    runs, files, texts = {}, {}, {}
    found = {path: json.loads(path.read_text()) for path in sorted((root / "bench/results").glob("*.json"))}
    for path in sorted(found, key=lambda path: "rows" in found[path]):
        target, of_file = path, found[path]
        if "rows" in of_file:  # as a benchmark wrote it
            subject, dot, machine = path.stem.partition(".")
            subject = next((one for one in SUBJECTS if subject.startswith(one)), subject)
            target, of_file = path.with_name(f"{subject}{dot}{machine}.json"), {path.stem: of_file}
            texts[path] = None
        files.setdefault(target, {}).update(of_file)
        runs.update(of_file)
    return runs, texts | {path: json_text(files[path]) for path in files}


def json_text(runs):
    """One row a line."""
    texts = []
    for name, run in sorted(runs.items()):
        head = json.dumps({key: value for key, value in run.items() if key != "rows"})[:-1]
        rows = ",\n".join(f"  {json.dumps(row)}" for row in run["rows"])
        texts.append(f"{json.dumps(name)}: {head},\n \"rows\": [\n{rows}]}}")
    return "{\n" + ",\n".join(texts) + "\n}\n"


def wrapped(line):
    """Lines of at most 120 characters, of what is no row of a table."""
    is_short = len(line) <= 120 or line.startswith("|")
    return [line] if is_short else textwrap.wrap(line, 120, break_long_words=False, break_on_hyphens=False)


def wanted_files(root):
    runs, wanted = load_runs(root)
    makers = {"results": results_block, "gpus": gpus_block, "bounds": bounds_block, "peers": peers_block, "doors": doors_block}
    for path in (root / "bench/results/peers").glob("*.json"):
        runs[path.stem] = json.loads(path.read_text())

    def fill(match):
        kind, name = match.groups()
        lines = [part for line in makers[kind](runs, name) for part in wrapped(line)]
        return "\n".join([f"<!-- {kind} {name} -->", *lines, f"<!-- end {kind} -->"])

    for path in sorted([*root.glob("*.md"), *root.glob("docs/*.md")]):
        wanted[path] = BLOCK.sub(fill, path.read_text())
    return wanted


def main():
    parser = tree.parser(__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="report what is out of date, write nothing")
    args = parser.parse_args()
    root = args.root.resolve()
    wanted = wanted_files(root)
    stale = [path for path, text in wanted.items() if (path.read_text() if path.is_file() else None) != text]
    if args.check:
        findings = [f"{path.relative_to(root)}: differs from bench/results" for path in stale]
        return tree.report("render_results", findings, "every quoted number is in bench/results")
    for path in stale:
        path.unlink() if wanted[path] is None else path.write_text(wanted[path])
        print(f"{'removed' if wanted[path] is None else 'wrote'} {path.relative_to(root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
