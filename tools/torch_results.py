# SPDX-License-Identifier: Apache-2.0
"""What render_results.py shows of bench/torch_bench.py: calls from Python, and a whole MoE layer with each dispatcher."""

GIB = 2**30


def is_torch(results):
    return bool(results["rows"]) and all(is_layer(row) or is_call(row) for row in results["rows"])


def is_layer(row):
    return row["op"] == "moe_layer"


def is_call(row):
    return row["mode"].startswith("python ")


def number(value, digits=0):
    return "-" if value is None else f"{value:,.{digits}f}"


def gib(size):
    return "-" if size is None else number(size / GIB, 2)


def times_faster(row):
    return row["rival"]["us_p50"] / row["us_p50"] if "rival" in row else None


def dispatcher(row):
    return row["mode"].partition(",")[0]


def shape(row):
    return (
        f"{row['ranks']} GPUs, {row['tokens']:,} tokens each, hidden {row['hidden']:,}, {row['experts']} experts, "
        f"top-{row['topk']}, {row['dtype']}"
    )


def heading(row):
    what = "MoE layer, forward and backward" if is_layer(row) else "calls from Python"
    case = f"Case {row['case']}, {what}" if "case" in row else what[0].upper() + what[1:]
    return f"{case}: {shape(row)}:"


def by_heading(rows):
    found = {}
    for row in rows:
        found.setdefault(heading(row), []).append(row)
    return found


def layer_line(row):
    peak, parameters = row.get("peak_bytes"), row.get("parameter_bytes")
    rest = None if peak is None or parameters is None else peak - parameters
    cells = [dispatcher(row), number(row["us_p50"]), number(row["us_p99"])]
    cells += [
        number(row.get("forward_us_p50")),
        number(row.get("backward_us_p50")),
        number(times_faster(row), 2),
    ]
    return cells + [gib(peak), gib(rest), gib(row.get("exchange_bytes"))]


def call_line(row):
    return [
        row["op"],
        row["mode"].removeprefix("python "),
        number(row["us_p50"]),
        number(row["us_p99"]),
    ]


LAYER_HEADER = [
    "dispatcher",
    "p50 us",
    "p99 us",
    "forward us",
    "backward us",
    "times faster than alltoall",
]
LAYER_HEADER += ["peak GiB", "without parameters and gradients", "exchange beside it, GiB"]
CALL_HEADER = ["operation", "mode", "p50 us", "p99 us"]


def markdown(results):
    """Tables, one for each case: a line for each dispatcher, or for each call and mode."""
    lines = []
    for text, rows in by_heading(results["rows"]).items():
        of_layer = is_layer(rows[0])
        header, names = (LAYER_HEADER, 1) if of_layer else (CALL_HEADER, 2)
        lines += ["", text, "", "| " + " | ".join(header) + " |"]
        lines.append("|" + "---|" * names + "--:|" * (len(header) - names))
        lines += [
            "| " + " | ".join(layer_line(row) if of_layer else call_line(row)) + " |"
            for row in rows
        ]
    return "\n".join(lines)


def bars(results):
    """[(group, [(class, label, microseconds)])]: one group for each case, and for each operation of calls."""
    groups = {}
    for row in results["rows"]:
        case = row.get("case", f"{row['hidden']:,}")
        label, kind = row["mode"].removeprefix("python "), "weft"
        if is_layer(row):
            label = dispatcher(row) + (f", {gib(row['peak_bytes'])} GiB" if "peak_bytes" in row else "")
            kind = "rival" if row["executor"] == "nccl" else "weft"
        groups.setdefault(f"{case} {row['op']}", []).append((kind, label, row["us_p50"]))
    return list(groups.items())
