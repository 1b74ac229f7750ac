# SPDX-License-Identifier: Apache-2.0
import json

from run_tool import run_tool, write_tree

ROW = {
    **{"op": "dispatch", "executor": "cpu", "transport": "shm", "layout": "expert_major", "dtype": "bfloat16"},
    **{"ranks": 2, "tokens": 2048, "hidden": 4096, "experts": 64, "topk": 8, "pad": 128, "sms": 0},
    **{"mode": "exact direct", "us_p50": 2500.4, "us_p99": 3000.0, "wire_bytes": 5000000},
    **{"logical_bytes": 50000000, "limit_us": 2000.0, "percent_of_limit": 80.0, "checked": True},
    "rival": {"name": "the usual way", "us_p50": 10001.6},
}
RESULTS = {
    **{"commit": "0123456789abcdef", "dirty": False, "date": "2001-02-03T04:05:06Z", "machine": "a machine"},
    **{"gpus": [], "driver": "none", "cuda": "none", "limit_gbps": 25.0, "gather_gbps": 20.0, "rows": [ROW]},
}
QUOTE = "before\n<!-- results case.m -->\n<!-- end results -->\nafter\n"


def make_tree(root, results=RESULTS, quote=QUOTE):
    return write_tree(root, {"bench/results/case.m.json": json.dumps(results), "README.md": quote})


def test_quotes_numbers_between_the_marks_alone(tmp_path):
    root = make_tree(tmp_path)
    assert run_tool("render_results", root)[0] == 0
    text = (root / "README.md").read_text()
    assert text.startswith("before\n<!-- results case.m -->\n") and text.endswith("<!-- end results -->\nafter\n")
    assert "| dispatch | yes | 2,500 | 3,000 | 2.0 | 20.0 | 80 | the usual way | 10,002 | 4.00 |" in text
    assert "2001-02-03 at commit `0123456789ab` on a machine; plain copies reach 25.0 GB/s" in text
    assert "the usual way" in (root / "docs/plots/case.m.svg").read_text()
    assert run_tool("render_results", root, "--check") == (
        0,
        "render_results: every quoted number is in bench/results\n",
    )


def test_shows_multiprocessors_and_plots_the_fastest(tmp_path):
    alone = {key: value for key, value in ROW.items() if key != "rival"} | {"executor": "cuda", "mode": "budget graph"}
    rows = [{**alone, "sms": sms, "us_p50": us} for sms, us in [(8, 90.0), (32, 40.0)]]
    rows.append({**ROW, "executor": "nccl", "mode": "one row per rank", "us_p50": 70.0})
    root = make_tree(tmp_path, {**RESULTS, "rows": rows})
    assert run_tool("render_results", root)[0] == 0
    text = (root / "README.md").read_text()
    assert "| dispatch | 8 | yes | 90 |" in text and "| dispatch | 32 | yes | 40 |" in text
    plot = (root / "docs/plots/case.m.svg").read_text()
    assert "40 us, Weft, as a graph, 32 SMs" in plot and "8 SMs" not in plot
    assert "70 us, NCCL, one row per rank" in plot


def gpu_tree(root, names):
    """Case A of a machine `m` with two GPUs, beside NCCL."""
    alone = {key: value for key, value in ROW.items() if key != "rival"} | {"executor": "cuda", "mode": "exact direct"}
    nccl = {**alone, "executor": "nccl", "mode": "one row per route", "us_p50": 120.0}
    texts = {
        "gpu-a.m": [{**alone, "sms": sms, "us_p50": us} for sms, us in [(16, 90.0), (40, 60.04), (120, 40.0)]],
        "domains-a.m": [{**alone, "sms": 8, "us_p50": 1.0}],
        "nccl.m": [nccl, {**nccl, "mode": "one row per rank", "us_p50": 80.0}, {**nccl, "hidden": 1, "us_p50": 1.0}],
    }
    files = {
        f"bench/results/{name}.json": json.dumps({**RESULTS, "gpus": ["a GPU", "a GPU"], "rows": texts[name]})
        for name in names
    }
    return write_tree(root, {"README.md": "<!-- gpus m -->\n<!-- end gpus -->\n", **files})


def test_sums_up_a_machine_with_gpus(tmp_path):
    root = gpu_tree(tmp_path, ["gpu-a.m", "domains-a.m", "nccl.m"])
    assert run_tool("render_results", root)[0] == 0
    text = (root / "README.md").read_text()
    rows = [line for line in text.splitlines() if " dispatch " in line]
    assert rows == [
        "| A | dispatch | exact direct | 120 | yes | 40.0 | 2,000.0 | 80 | 120 | 3.00 | 80 | 2.00 |",
        "| A | dispatch | exact direct | 40 | yes | 60.0 | 2,000.0 | 80 | 120 | 2.00 | 80 | 1.33 |",
        "| A | dispatch | exact direct | 16 | yes | 90.0 | 2,000.0 | 80 | 120 | 1.33 | 80 | 0.89 |",
    ]
    assert "2 x a GPU" in text and "![m](docs/plots/gpus.m.svg)" in text
    assert "limit of the links" in (root / "docs/plots/gpus.m.svg").read_text()
    assert run_tool("render_results", root, "--check")[0] == 0


def test_says_what_bounds_the_calls_of_a_machine_with_gpus(tmp_path):
    root = gpu_tree(tmp_path, ["gpu-a.m"])
    (root / "README.md").write_text("<!-- bounds m -->\n<!-- end bounds -->\n")
    assert run_tool("render_results", root)[0] == 0
    assert (root / "README.md").read_text() == "<!-- bounds m -->\n<!-- end bounds -->\n"  # half of it is missing
    row = {**ROW, "executor": "cuda", "us_p50": 30.0, "limit_us": 10.0, "sms": 132}
    link = {**row, "op": "link", "sms": 120}
    links = [
        {**link, "mode": f"{way} 4 KB", "percent_of_limit": percent}
        for way, percent in [("bulk stores", 75.0), ("stores", 80.0), ("bulk loads", 90.0)]
    ]
    for name, rows in [("gpu-d.m", [row]), ("limits.m", links)]:
        (root / f"bench/results/{name}.json").write_text(json.dumps({**RESULTS, "rows": rows}))
    assert run_tool("render_results", root)[0] == 0
    lines = [line for line in (root / "README.md").read_text().splitlines() if line.startswith("| A")]
    assert lines == ["| A | dispatch | 120 | 40.0 | 2,000.0 | 80 | 2,500.0 | 20.0 | 2,520.0 | 79 | 6,300 |"]
    assert run_tool("render_results", root, "--check")[0] == 0


def test_shows_nothing_of_gpus_that_are_not_measured(tmp_path):
    root = gpu_tree(tmp_path, [])
    assert run_tool("render_results", root)[0] == 0
    assert (root / "README.md").read_text() == "<!-- gpus m -->\n<!-- end gpus -->\n"
    assert run_tool("render_results", root, "--check")[0] == 0


def test_finds_a_number_that_was_typed_by_hand(tmp_path):
    root = make_tree(tmp_path)
    run_tool("render_results", root)
    readme = root / "README.md"
    readme.write_text(readme.read_text().replace("4.00", "5.00"))
    status, out = run_tool("render_results", root, "--check")
    assert status == 1
    assert out.startswith("README.md: differs from bench/results\n")
    assert "5.00" in readme.read_text()


def test_finds_a_plot_without_results(tmp_path):
    root = write_tree(make_tree(tmp_path), {"docs/plots/old.svg": "<svg/>"})
    run_tool("render_results", root)
    assert not (root / "docs/plots/old.svg").exists()


def test_refuses_what_it_cannot_quote(tmp_path):
    status, out = run_tool("render_results", make_tree(tmp_path, quote=QUOTE.replace("case.m", "nothing")))
    assert status == 1
    assert "README.md quotes nothing, but bench/results/nothing.json does not exist" in out
    status, out = run_tool("render_results", make_tree(tmp_path, results={"rows": []}))
    assert status == 1
    assert "lacks commit, dirty, date" in out


def torch_tree(root):
    names = ["torch-layer.m", "torch-exchange.m"]
    layer = {**ROW, "op": "moe_layer", "case": "A", "us_p50": 9000.0, "peak_bytes": 3 * 2**30}
    mine = {**layer, "executor": "cuda", "mode": "deepep, forward + backward", "rival": {"name": "n", "us_p50": 13500.0}}
    mine |= {"forward_us_p50": 4000.0, "backward_us_p50": 5000.0, "parameter_bytes": 2**30, "exchange_bytes": 2**29}
    theirs = {key: value for key, value in layer.items() if key != "rival"}
    theirs |= {"executor": "nccl", "mode": "alltoall, forward + backward", "us_p50": 13500.0}
    call = {key: value for key, value in ROW.items() if key != "rival"} | {"executor": "cuda", "mode": "python exact"}
    texts = {"torch-layer.m": [theirs, mine], "torch-exchange.m": [call, {**call, "mode": "python budget"}]}
    results = {**RESULTS, "gpus": ["a GPU"], "limit_gbps": 0.0}
    files = {f"bench/results/{name}.json": json.dumps({**results, "rows": texts[name]}) for name in names}
    return write_tree(root, {"README.md": "<!-- gpus m -->\n<!-- end gpus -->\n", **files})


def test_shows_a_layer_with_each_dispatcher(tmp_path):
    root = torch_tree(tmp_path)
    assert run_tool("render_results", root)[0] == 0
    page = (root / "docs/results.md").read_text()
    assert "Case A, MoE layer, forward and backward: 2 GPUs, 2,048 tokens each, hidden 4,096" in page
    assert "| alltoall | 13,500 | 3,000 | - | - | - | 3.00 | - | - |" in page
    assert "| deepep | 9,000 | 3,000 | 4,000 | 5,000 | 1.50 | 3.00 | 2.00 | 0.50 |" in page
    assert "copy engines" not in page
    plot = (root / "docs/plots/torch-layer.m.svg").read_text()
    assert "A moe_layer" in plot and "9,000 us, deepep, 3.00 GiB" in plot and plot.count('class="rival"') == 1
    assert run_tool("render_results", root, "--check")[0] == 0


def test_shows_calls_from_python_beside_no_reference_case(tmp_path):
    root = torch_tree(tmp_path)
    assert run_tool("render_results", root)[0] == 0
    page = (root / "docs/results.md").read_text()
    assert "Calls from Python: 2 GPUs" in page and "| dispatch | budget | 2,500 | 3,000 |" in page
    assert "2,500 us, exact" in (root / "docs/plots/torch-exchange.m.svg").read_text()
    assert (root / "README.md").read_text() == "<!-- gpus m -->\n<!-- end gpus -->\n"


def test_shows_exchanges_beside_computation(tmp_path):
    beside = {key: value for key, value in ROW.items() if key != "rival"}
    beside |= {"case": "B", "mode": "beside products", "sms": 48, "quiet_us": 300.0, "slowdown": 0.25, "cost_us": 90.0}
    step = {"op": "train_step", "mode": "weft-overlap", "seconds": 0.5, "ratio": 1.25, "peak_gib": 20.0}
    step |= {"exposed_of_exchange": 0.25, "exposed_of_step": 0.04, "idle_of_step": None, "busiest_of_mean": 1.5}
    traced = {**step, "ratio": 1.5, "exchange_of_step": 0.17, "moving_of_step": 0.09}
    shape = {"layers": 6, "sequences": 2, "sequence": 4096}
    shape |= {"hidden": 2048, "experts": 128, "topk": 8, "width": 768}
    results = {**RESULTS, "gpus": ["a GPU"], "limit_gbps": 0.0, "ranks": 2, "micro_batches": 4, "shape": shape}
    other = {**results, "shape": {**shape, "hidden": 7168}, "exchange_copies": "always"}
    files = {
        "beside.m": {**results, "rows": [beside]},
        "steps.m": {**results, "rows": [step, {**step, "mode": "alltoall"}]},
        "other.m": {**other, "rows": [step, {**step, "mode": "weft"}]},
        "traced.m": {**other, "rows": [traced], "exposed_has_copies": True},
    }
    root = write_tree(
        tmp_path, {f"bench/results/{name}.json": json.dumps(found) for name, found in files.items()}
    )
    assert run_tool("render_results", root)[0] == 0
    page = (root / "docs/results.md").read_text()
    assert "| dispatch | 48 | 300 | 2,500 | 25.0 | 90 |" in page and "Case B: 2 GPUs" in page
    assert "6 layers of Qwen3-30B-A3B on 2 GPUs, 4 micro-batches of 2 x 4,096 tokens on each:" in page
    assert "6 layers of hidden 7,168, 128 experts, top-8, width 768 on 2 GPUs" in page
    assert "on each, by copy engines beside computation:" in page
    # Columns of which nothing is known are not shown.
    assert "| weft-overlap | 0.5000 | 1.25 | 16.0 | 25.0 | 4.0 | 1.50 | 20.0 |" in page
    # Copies were not looked for in this trace, and are nowhere but with overlap.
    assert "| weft-overlap | 0.5000 | 1.25 | - | - | - | 1.50 | 20.0 |" in page
    assert "| weft | 0.5000 | 1.25 | 16.0 | 25.0 | 4.0 | 1.50 | 20.0 |" in page
    assert "| weft-overlap | 0.5000 | 1.50 | 17.0 | 9.0 | 25.0 | 4.0 | 1.50 | 20.0 |" in page
    assert "90 us, lost by products, 48 SMs" in (root / "docs/plots/beside.m.svg").read_text()
    steps = (root / "docs/plots/steps.m.svg").read_text()
    assert "500,000 us, weft-overlap" in steps and steps.count('class="rival"') == 1
