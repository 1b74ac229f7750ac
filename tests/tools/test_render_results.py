# SPDX-License-Identifier: Apache-2.0
import json

from run_tool import run_tool, write_tree

ROW = {
    **{
        "op": "dispatch",
        "executor": "cpu",
        "transport": "shm",
        "layout": "expert_major",
        "dtype": "bfloat16",
    },
    **{"ranks": 2, "tokens": 2048, "hidden": 4096, "experts": 64, "topk": 8, "pad": 128, "sms": 0},
    **{"mode": "exact direct", "us_p50": 2500.4, "us_p99": 3000.0, "wire_bytes": 5000000},
    **{"logical_bytes": 50000000, "limit_us": 2000.0, "percent_of_limit": 80.0, "checked": True},
}
GPU_ROW = ROW | {"executor": "cuda"}
RIVAL = {"name": "the usual way", "us_p50": 10001.6}
RUN = {
    **{
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2001-02-03T04:05:06Z",
        "machine": "a machine",
    },
    **{"gpus": [], "driver": "none", "cuda": "none", "limit_gbps": 25.0, "gather_gbps": 20.0},
}
GPU_RUN = RUN | {"gpus": ["a GPU", "a GPU"]}


def mark(kind, name):
    return f"<!-- {kind} {name} -->\n<!-- end {kind} -->\n"


def make_tree(root, readme, runs, run=RUN):
    """`runs` maps names of raw files, as benchmarks write them, to rows, or to whole runs."""
    texts = {
        name: rows if isinstance(rows, dict) else run | {"rows": rows}
        for name, rows in runs.items()
    }
    files = {f"bench/results/{name}.json": json.dumps(text) for name, text in texts.items()}
    return write_tree(root, {"README.md": readme, **files})


def rendered(root):
    """README.md as the tool fills it; what it wrote, it finds true."""
    status, out = run_tool("render_results", root)
    assert status == 0, out
    assert run_tool("render_results", root, "--check")[0] == 0
    return (root / "README.md").read_text()


def unwrapped(text):
    return " ".join(text.split())


def lines_of(text, *begins):
    return [line for line in text.splitlines() if line.startswith(begins)]


def test_quotes_numbers_between_the_marks_only(tmp_path):
    root = make_tree(
        tmp_path,
        f"before\n{mark('results', 'case.m')}after\n",
        {"case.m": [ROW | {"rival": RIVAL}]},
    )
    text = rendered(root)
    assert text.startswith("before\n<!-- results case.m -->\n") and text.endswith(
        "<!-- end results -->\nafter\n"
    )
    assert (
        "| dispatch | yes | 2,500 | 3,000 | 2.0 | 20.0 | 80 | the usual way | 10,002 | 4.00 |"
        in text
    )
    assert "2001-02-03 at commit `0123456789ab` on a machine; plain copies reach 25.0 GB/s" in text
    assert run_tool("render_results", root, "--check") == (
        0,
        "render_results: every quoted number is in bench/results\n",
    )


def test_leaves_out_columns_of_which_nothing_is_known(tmp_path):
    rows = [ROW | {"executor": "cuda", "sms": sms, "percent_of_limit": None} for sms in (8, 32)]
    text = rendered(make_tree(tmp_path, mark("results", "case.m"), {"case.m": rows}))
    assert (
        "| operation | SMs | checked | p50 us | p99 us | wire GB/s | logical GB/s |\n|---|--:|---|"
        in text
    )
    assert "| dispatch | 8 | yes |" in text and "| dispatch | 32 | yes |" in text


def test_moves_runs_of_one_subject_into_one_file(tmp_path):
    readme = mark("results", "torch-b.m")
    root = make_tree(tmp_path, readme, {"torch-a.m": [ROW, ROW], "other.m": [ROW]})
    status, out = run_tool("render_results", root)
    assert status == 1 and "a document quotes torch-b.m, which bench/results does not have" in out
    for us in (7000.0, 8000.0):  # a run that is measured again replaces the one before
        make_tree(tmp_path, readme, {"torch-b.m": [ROW | {"us_p50": us}]})
        assert (
            "bench/results/torch-b.m.json: differs"
            in run_tool("render_results", root, "--check")[1]
        )
        assert f"{us:,.0f}" in rendered(root)
    assert sorted(path.name for path in (root / "bench/results").iterdir()) == [
        "other.m.json",
        "torch.m.json",
    ]
    assert len(lines_of((root / "bench/results/torch.m.json").read_text(), '  {"op"')) == 3


def test_sums_up_a_machine_with_gpus(tmp_path):
    rows = [
        GPU_ROW | {"sms": sms, "us_p50": us} for sms, us in [(16, 90.0), (40, 60.04), (120, 40.0)]
    ]
    nccl = GPU_ROW | {"executor": "nccl", "mode": "one row per route", "us_p50": 120.0}
    nccl = [
        nccl,
        nccl | {"mode": "one row per rank", "us_p50": 80.0},
        nccl | {"hidden": 1, "us_p50": 1.0},
    ]
    readme = mark("gpus", "m") + mark("gpus", "unknown")
    text = rendered(
        make_tree(tmp_path, readme, {"gpu-a.m": rows, "domains-a.m": rows, "nccl.m": nccl}, GPU_RUN)
    )
    assert lines_of(text, "| A | dispatch") == [
        "| A | dispatch | exact direct | 120 | yes | 40.0 | 2,000.0 | 80 | 120 | 3.00 | 80 | 2.00 |",
        "| A | dispatch | exact direct | 40 | yes | 60.0 | 2,000.0 | 80 | 120 | 2.00 | 80 | 1.33 |",
        "| A | dispatch | exact direct | 16 | yes | 90.0 | 2,000.0 | 80 | 120 | 1.33 | 80 | 0.89 |",
    ]
    assert "2 x a GPU" in text and text.endswith(mark("gpus", "unknown"))


def test_says_what_bounds_the_calls_of_a_machine_with_gpus(tmp_path):
    rows = [GPU_ROW | {"sms": 120, "us_p50": 40.0}]
    assert rendered(make_tree(tmp_path, mark("bounds", "m"), {"gpu-a.m": rows})) == mark(
        "bounds", "m"
    )  # half is missing
    link = GPU_ROW | {"op": "link", "sms": 120}
    rates = [("bulk stores", 75.0), ("stores", 80.0), ("bulk loads", 90.0)]
    links = [link | {"mode": f"{way} 4 KB", "percent_of_limit": percent} for way, percent in rates]
    few = [GPU_ROW | {"us_p50": 30.0, "limit_us": 10.0, "sms": 132}]
    text = rendered(make_tree(tmp_path, mark("bounds", "m"), {"gpu-d.m": few, "limits.m": links}))
    assert lines_of(text, "| A") == [
        "| A | dispatch | 120 | 40.0 | 2,000.0 | 80 | 2,500.0 | 20.0 | 2,520.0 | 79 | 6,300 |"
    ]


def test_shows_weft_beside_other_libraries(tmp_path):
    case_a = {"tokens": 4096, "hidden": 7168, "experts": 256, "topk": 8}
    mine = [GPU_ROW | case_a | {"sms": sms, "us_p50": us} for sms, us in [(24, 90.0), (132, 60.0)]]
    few = [
        GPU_ROW
        | case_a
        | {"tokens": 128, "op": "plan+dispatch", "mode": "budget graph direct", "us_p50": 9.0}
    ]
    peer = ROW | case_a | {"mode": "tuned"}
    peers = [
        peer | {"executor": "one", "layout": "rank_major", "sms": 24, "us_p50": 80},
        peer | {"executor": "two", "us_p50": 70, "mode": "fused"},
        peer | {"executor": "two", "us_p50": 75},
        peer | {"executor": "two", "op": "combine", "dtype": "fp8", "us_p50": 50},
        peer
        | {"executor": "one", "op": "ll_dispatch", "mode": "graph", "tokens": 128, "us_p50": 8},
    ]
    root = make_tree(
        tmp_path,
        mark("peers", "m"),
        {"gpu-a.m": mine, "gpu-d.m": few, "gpu-a-skew.m": mine},
        GPU_RUN,
    )
    write_tree(
        root, {"bench/results/peers/peers.m.json": json.dumps({"about": "Them.", "rows": peers})}
    )
    text = rendered(root)
    assert max(len(line) for line in text.splitlines() if line[:1] not in ("|", "<")) <= 120
    prose = unwrapped(text)
    assert "Weft was measured 2001-02-03 (`0123456789ab`). Where there are few tokens" in prose
    assert "graph. Them." in prose
    assert lines_of(text, "| case", "| A", "| D") == [
        "| case | operation | rows lie | **Weft** | Weft on 24 | one | two |",
        "| A | dispatch | by expert | 60 (132) | 90 (24) | - | 70 |",
        "| A | dispatch | by rank | - | - | 80 (24) | - |",
        "| A, FP8 | combine | by expert | - | - | - | 50 |",
        "| D | plan+dispatch | by expert | 9 | - | 8 | - |",
    ]
    assert "How each was run: one (tuned / graph); two (fused / tuned)." in prose


def test_shows_calls_of_other_libraries_names_beside_them(tmp_path):
    call = GPU_ROW | {
        "op": "ll_dispatch",
        "case": "D",
        "sms": 0,
        "host_us_p50": 45.2,
        "host_wait_us_p50": 0.0,
    }
    waiting = call | {
        "op": "v1_dispatch",
        "case": "A",
        "sms": 20,
        "host_us_p50": 190.6,
        "host_wait_us_p50": 12.4,
    }
    doors = [
        call | {"mode": "eager", "us_p50": 17.84, "gpu_items": 1},
        call | {"mode": "graph1", "us_p50": 14.91},
    ]
    doors += [call | {"mode": "graph", "us_p50": 13.22}, call | {"mode": "first", "us_p50": None}]
    doors += [waiting | {"mode": "eager", "us_p50": 194.8, "gpu_items": 3}]
    parts = {
        "mode": "profiled",
        "host_us": 99.6,
        "launches_us": 19.4,
        "outputs_us": 18.1,
        "events_us": 2.7,
    }
    doors += [{"op": "v1_combine", "case": "B", "dtype": "bfloat16"} | parts]
    peer = ROW | {
        "op": "ll_dispatch",
        "executor": "one",
        "mode": "graph",
        "us_p50": 20.7,
        "host_us_p50": 26.5,
    }
    root = make_tree(
        tmp_path, mark("doors", "m"), {"doors.m": doors}, GPU_RUN | {"limit_gbps": 0.0}
    )
    write_tree(
        root, {"bench/results/peers/peers.m.json": json.dumps({"about": "Them.", "rows": [peer]})}
    )
    text = rendered(root)
    assert "Measured 2001-02-03 at commit `0123456789ab`" in text
    assert lines_of(text, "| D", "| A", "| B") == [
        "| D | ll_dispatch | bfloat16 | - | 14.9 | 13.2 | 17.8 | 45 | - | 1 | one | 20.7 | 26 |",
        "| A | v1_dispatch | bfloat16 | 20 | - | - | 194.8 | 191 | 12 | 3 | - | - | - |",
        "| B | v1_combine | bfloat16 | 100 | 19 | 18 | 3 |",
    ]


def test_finds_a_number_that_was_typed_by_hand(tmp_path):
    root = make_tree(tmp_path, mark("results", "case.m"), {"case.m": [ROW]})
    readme = root / "README.md"
    readme.write_text(rendered(root).replace("2,500", "2,400"))
    assert run_tool("render_results", root, "--check")[1].startswith(
        "README.md: differs from bench/results\n"
    )
    assert "2,400" in readme.read_text()


def test_shows_a_layer_with_each_dispatcher_and_calls_from_python(tmp_path):
    theirs = GPU_ROW | {"op": "moe_layer", "case": "A", "us_p50": 13500.0, "peak_bytes": 3 * 2**30}
    theirs |= {"executor": "nccl", "mode": "alltoall, forward + backward"}
    mine = theirs | {
        "mode": "deepep, forward + backward",
        "rival": {"name": "n", "us_p50": 13500.0},
        "us_p50": 9000.0,
    }
    mine |= {
        "forward_us_p50": 4000.0,
        "backward_us_p50": 5000.0,
        "parameter_bytes": 2**30,
        "exchange_bytes": 2**29,
    }
    call = GPU_ROW | {"mode": "python budget"}
    runs = {"torch-layer.m": [theirs, mine], "torch-exchange.m": [call]}
    readme = mark("results", "torch-layer.m") + mark("results", "torch-exchange.m")
    text = rendered(make_tree(tmp_path, readme, runs, GPU_RUN | {"limit_gbps": 0.0}))
    assert (
        "Case A, MoE layer, forward and backward: 2 GPUs, 2,048 tokens each, hidden 4,096" in text
    )
    assert "| alltoall | 13,500 | 3,000 | - | - | - | 3.00 | 3.00 | - |" in text
    assert "| deepep | 9,000 | 3,000 | 4,000 | 5,000 | 1.50 | 3.00 | 2.00 | 0.50 |" in text
    assert "Calls from Python: 2 GPUs" in text and "| dispatch | budget | 2,500 | 3,000 |" in text
    assert "copy engines" not in text


def test_shows_steps_and_exchanges_beside_computation(tmp_path):
    beside = GPU_ROW | {
        "case": "B",
        "mode": "beside products",
        "sms": 48,
        "quiet_us": 300.0,
        "slowdown": 0.25,
        "cost_us": 90.0,
    }
    step = {
        "op": "train_step",
        "mode": "weft-overlap",
        "seconds": 0.5,
        "ratio": 1.25,
        "peak_gib": 20.0,
    }
    step |= {
        "exposed_of_exchange": 0.25,
        "exposed_of_step": 0.04,
        "idle_of_step": None,
        "busiest_of_mean": 1.5,
    }
    shape = {
        "layers": 6,
        "sequences": 2,
        "sequence": 4096,
        "hidden": 2048,
        "experts": 128,
        "topk": 8,
        "width": 768,
    }
    run = GPU_RUN | {"limit_gbps": 0.0, "ranks": 2, "micro_batches": 4, "shape": shape}
    other = run | {"shape": shape | {"hidden": 7168}, "exchange_copies": "always"}
    traced = step | {"ratio": 1.5, "exchange_of_step": 0.17, "moving_of_step": 0.09}
    runs = {"beside.m": run | {"rows": [beside]}, "steps.m": run | {"rows": [step]}}
    runs["steps-other.m"] = other | {"rows": [step, step | {"mode": "weft"}]}
    runs["steps-traced.m"] = other | {"rows": [traced], "exposed_has_copies": True}
    text = rendered(make_tree(tmp_path, "".join(mark("results", name) for name in runs), runs))
    assert "| dispatch | 48 | 300 | 2,500 | 25.0 | 90 |" in text and "Case B: 2 GPUs" in text
    assert (
        "6 layers of Qwen3-30B-A3B on 2 GPUs, 4 micro-batches of 2 x 4,096 tokens on each:" in text
    )
    assert "6 layers of hidden 7,168, 128 experts, top-8, width 768 on 2 GPUs" in text
    assert "on each, by copy engines beside computation:" in unwrapped(text)
    assert "| weft-overlap | 0.5000 | 1.25 | 16.0 | 25.0 | 4.0 | 1.50 | 20.0 |" in text
    # Copies were not looked for in this trace, and only a schedule with overlap has any.
    assert "| weft-overlap | 0.5000 | 1.25 | - | - | - | 1.50 | 20.0 |" in text
    assert "| weft | 0.5000 | 1.25 | 16.0 | 25.0 | 4.0 | 1.50 | 20.0 |" in text
    assert "| weft-overlap | 0.5000 | 1.50 | 17.0 | 9.0 | 25.0 | 4.0 | 1.50 | 20.0 |" in text


def test_a_whole_vllm(tmp_path):
    row = {"op": "vllm", "mode": "low-latency", "against": "default", "task": "greedy"}
    row |= {"prompts": 48, "same_prompts": 47, "tokens": 3072, "same_tokens": 3000}
    row |= {"same_bits": 2900, "largest": 0.125, "near_ties": 1, "differences": 0}
    runs = {"vllm.2xgpu": GPU_RUN | {"rows": [row | {"decode_tps": 1234.5, "prefill_tps": None}]}}
    text = rendered(make_tree(tmp_path, mark("results", "vllm.2xgpu"), runs))
    assert "on two GPUs, tokens against those of `default`:" in text
    assert lines_of(text, "| low") == [
        "| low-latency | greedy | 48 | 47 | 3,072 | 3,000 | 2,900 | 0.125 | 1 | 0 | 1,234 |"
    ]
