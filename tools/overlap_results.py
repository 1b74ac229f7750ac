# SPDX-License-Identifier: Apache-2.0
"""What render_results.py shows of exchanges beside computation: bench/overlap_bench.py, and steps of the example
qwen3_moe."""

from torch_results import number, shape


def is_overlap(results):
    return bool(results["rows"]) and all(is_step(row) or is_beside(row) for row in results["rows"])


def is_step(row):
    return row["op"] == "train_step"


def is_beside(row):
    return row["mode"] == "beside products"


def percent(share):
    return "-" if share is None else f"{100 * share:.1f}"


def table(header, num_names, lines):
    rule = "|" + "---|" * num_names + "--:|" * (len(header) - num_names)
    return ["| " + " | ".join(header) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines)]


STEP_HEADER = ["mode", "s/step", "times faster", "exchange, % of step", "moving, % of step"]
STEP_HEADER += ["exposed, % of exchange", "% of step", "idle, % of step", "busiest rank, of mean", "peak GiB"]
SHARES = ["exchange_of_step", "moving_of_step", "exposed_of_exchange", "exposed_of_step", "idle_of_step"]


def step_line(row, results):
    shares = [percent(row.get(key)) for key in SHARES]
    if may_miss_copies(row, results):
        shares = ["-"] * len(shares)
    elif "exchange_of_step" not in row and row["exposed_of_exchange"]:
        shares[0] = percent(row["exposed_of_step"] / row["exposed_of_exchange"])
    numbers = [number(row["seconds"], 4), number(row["ratio"], 2)]
    return [row["mode"], *numbers, *shares, number(row.get("busiest_of_mean"), 2), number(row["peak_gib"], 1)]


def may_miss_copies(row, results):
    """Whether copy engines carried rows when traces were not yet looked through for that."""
    by_copies = results.get("exchange_copies", "never") != "never" and "overlap" in row["mode"]
    return by_copies and not results.get("exposed_has_copies")


def steps(results):
    model = results["shape"]
    routing = ", experts at random" if results.get("balanced") else ""
    sizes = [model[key] for key in ("hidden", "experts", "topk", "width")]
    name = "Qwen3-30B-A3B"
    if sizes != [2048, 128, 8, 768]:
        name = "hidden {:,}, {} experts, top-{}, width {:,}".format(*sizes)
    choice = results.get("exchange_copies", "auto")
    routing += {"auto": "", "never": ", no copy engines", "always": ", by copy engines beside computation"}[choice]
    text = (
        f"{model['layers']} layers of {name} on {results['ranks']} GPUs, {results['micro_batches']} micro-batches "
        f"of {model['sequences']} x {model['sequence']:,} tokens on each{routing}:"
    )
    columns = zip(STEP_HEADER, *(step_line(row, results) for row in results["rows"]))
    known = [column for column in columns if set(column[1:]) != {"-"}]
    header, *lines = zip(*known)
    return ["", text, "", *table(header, 1, lines)]


BESIDE_HEADER = ["exchange", "SMs", "alone, us", "beside products, us", "products slower by, %", "costs, us"]


def beside_line(row):
    numbers = [number(row["quiet_us"]), number(row["us_p50"]), percent(row["slowdown"]), number(row["cost_us"])]
    return [row["op"], number(row["sms"]), *numbers]


def beside(results):
    lines, cases = [], {}
    for row in results["rows"]:
        cases.setdefault(f"Case {row['case']}: {shape(row)}:", []).append(row)
    for text, rows in cases.items():
        lines += ["", text, "", *table(BESIDE_HEADER, 1, [beside_line(row) for row in rows])]
    return lines


def markdown(results):
    return "\n".join(steps(results) if is_step(results["rows"][0]) else beside(results))


def bars(results):
    """[(group, [(class, label, microseconds)])]: steps, or what an exchange costs by its multiprocessors."""
    groups = {}
    for row in results["rows"]:
        if is_step(row):
            kind = "rival" if row["mode"].startswith("alltoall") else "weft"
            groups.setdefault("step", []).append((kind, row["mode"], 1e6 * row["seconds"]))
        else:
            label = f"lost by products, {row['sms']} SMs"
            groups.setdefault(f"{row['case']} {row['op']}", []).append(("weft", label, row["cost_us"]))
    return list(groups.items())
