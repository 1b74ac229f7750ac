# SPDX-License-Identifier: Apache-2.0
"""`weft-lab simulate`: agreement with `weft plan` and with measured times, files and refusals."""

import json
from pathlib import Path

import pytest

from conftest import TINY, one_error, weft

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
SMALL = "--tokens 200 --experts 32 --topk 4 --hidden 64".split()


def simulated(tmp_path, *args):
    path = tmp_path / "simulated.json"
    weft("simulate", *args, "--json", path)
    return json.loads(path.read_text())["sizes"]


def planned(*args):
    return json.loads(weft("plan", *args, "--json").stdout)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("skew", [0, 1])
def test_one_domain_moves_the_bytes_of_the_plan(tmp_path, ranks, skew):
    routing = "--tokens 200 --experts 24 --topk 4 --hidden 64".split()
    routing += ["--ranks", ranks, "--skew", skew, "--seed", 3, "--pad", 16]
    (size,) = simulated(tmp_path, *routing)
    plan = planned(*routing)
    wire = [rank["wire_bytes"] for rank in plan["ranks"]]
    logical = [rank["logical_bytes"] for rank in plan["ranks"]]
    rows = [rank["num_rows"] for rank in plan["ranks"]]
    row_bytes = plan["row_bytes"]
    assert size["row_bytes"] == row_bytes
    assert size["most"]["link_out"] * row_bytes == max(wire)
    assert size["mean"]["link_out"] == int(sum(wire) / ranks / row_bytes + 0.5)
    assert size["most"]["routes"] * row_bytes == max(logical)
    assert size["most"]["num_rows"] == max(rows)
    assert size["most"]["card_out"] == size["most"]["messages_out"] == 0
    assert size["domains_per_token"] == 1


@pytest.mark.parametrize("case", ["a", "b", "c"])
def test_times_of_one_domain_are_those_measured_on_gpus(tmp_path, case):
    """With all multiprocessors, as the model assumes."""
    rows = json.loads((RESULTS / "gpu.4xh200.json").read_text())[f"gpu-{case}.4xh200"]["rows"]
    best = {}
    for row in rows:
        if row["op"] in ("dispatch", "combine") and row["mode"] == "exact direct":
            best[row["op"]] = min(row["us_p50"], best.get(row["op"], row["us_p50"]))
    shape = [
        f"--{key}={row[key]}" for key in ("ranks", "tokens", "experts", "topk", "hidden", "pad")
    ]
    (size,) = simulated(tmp_path, *shape)
    for op, measured in best.items():
        assert size[f"{op}_us"] == pytest.approx(measured, rel=0.1), op


def test_a_token_crosses_once_to_a_domain_however_many_of_its_ranks_it_meets(tmp_path):
    (once,) = simulated(tmp_path, "--ranks", 16, "--domain", 4, *SMALL)
    (flat,) = simulated(tmp_path, "--ranks", 16, "--domain", 4, *SMALL, "--flat")
    assert once["mean"]["card_out_per_rank"] == flat["mean"]["card_out"]
    assert once["mean"]["card_out_per_rank"] == flat["mean"]["card_out_per_rank"]
    assert once["mean"]["card_out"] < flat["mean"]["card_out"]
    assert once["mean"]["forwarded"] > 0
    assert flat["mean"]["forwarded"] == flat["memory"]["forwarder"] == 0
    assert once["mean"]["card_out"] == once["mean"]["card_in"]
    assert once["mean"]["link_out"] == once["mean"]["link_in"]


def test_a_sweep_is_its_sizes_one_by_one_and_the_same_each_time(tmp_path):
    args = ["--domain", 4, *SMALL, "--skew", 0.5]
    together = simulated(tmp_path, "--sweep", "4,8,32", *args)
    assert [size["ranks"] for size in together] == [4, 8, 32]
    alone = [simulated(tmp_path, "--ranks", ranks, *args)[0] for ranks in (4, 8, 32)]
    assert together == alone


def test_real_routing_has_its_own_ranks_and_experts(tmp_path, book):
    routing = tmp_path / "steps.wrt"
    weft("train", book, *TINY, "--ranks", 4, "--threads", "--steps", 2, "--save-routing", routing)
    (size,) = simulated(tmp_path, routing, "--domain", 2)
    assert (size["ranks"], size["experts"], size["topk"], size["tokens"]) == (4, 4, 2, 8)
    assert size["mean"]["card_out"] > 0


def test_tables_can_be_chosen_and_all_begin_with_the_ranks():
    text = weft("simulate", "--sweep", "2,4", "--domain", 2, *SMALL).stdout
    assert text.count("\nranks ") == 6
    text = weft("simulate", "--sweep", "2,4", "--domain", 2, *SMALL, "--tables", "times,gpu").stdout
    assert text.count("\nranks ") == 2
    assert "slowest rank" in text and "executor of GPUs" in text and "CPU" not in text


def test_a_faster_card_is_never_slower(tmp_path):
    args = ["--ranks", 16, "--domain", 4, *SMALL]
    (slow,) = simulated(tmp_path, *args, "--set", "card_gbps=1,call_us=0")
    (fast,) = simulated(tmp_path, *args, "--set", "card_gbps=100", "--set", "call_us=0")
    assert fast["dispatch_us"] < slow["dispatch_us"]
    assert slow["dispatch_rows"]["bound"] == "cards"
    row_us = slow["row_bytes"] / 1e3
    assert slow["dispatch_rows"]["us"] >= slow["most"]["card_in"] * row_us


def test_a_layer_is_balanced_by_replicas(tmp_path):
    path = tmp_path / "simulated.json"
    text = weft(
        "simulate", *SMALL, "--ranks", 8, "--skew", 1, "--balance", 2, "--json", path
    ).stdout
    (step,) = json.loads(path.read_text())["steps"]
    routed, balanced, even = (step[name] for name in ("as routed", "balanced", "even"))
    assert routed["busiest_of_mean"] > 1.3
    assert 1.02 >= balanced["busiest_of_mean"] >= even["busiest_of_mean"] == 1
    assert routed["copies"] == even["copies"] == 0 < balanced["copies"] <= 16
    for times in (routed, balanced, even):
        parts = times["exchange_us"] + times["products_us"] + times["rest_us"] + times["exposed_us"]
        assert times["us"] == pytest.approx(parts, abs=0.1)
        assert times["of_even"] == pytest.approx(times["us"] / even["us"], abs=1e-3)
        assert times["of_even"] <= times["of_even_if_not_hidden"]
    lines = text[text.index("A layer, forward and backward") :].splitlines()
    assert [line.split()[1] for line in lines[4:]] == ["as", "balanced", "even"]


def test_a_calibrated_model_is_a_model(tmp_path):
    model = tmp_path / "here.json"
    shown = weft("simulate", "--calibrate", model).stdout
    values = json.loads(model.read_text())["values"]
    for name in ("link_gbps", "copy_gbps", "post_us", "card_latency_us", "plan_token_ns"):
        assert values[name]["value"] > 0, name
        assert values[name]["origin"].startswith("measured"), name
    assert values["card_gbps"]["origin"].startswith("assumed")
    assert {sample["ranks"] for sample in json.loads(model.read_text())["plan_samples"]} >= {2, 64}
    assert weft("simulate", "--model", model, "--show-model").stdout == shown
    (size,) = simulated(tmp_path, "--model", model, "--ranks", 8, "--domain", 4, *SMALL)
    assert size["dispatch_us"] > 0


def test_ends_grow_with_the_budget():
    def ends(*args):
        lines = weft("simulate", "--ends", *args).stdout.splitlines()
        (line,) = [
            line
            for line in lines
            if line.startswith("CPU: control region ") and "without" not in line
        ]
        return int(line.split()[-1].replace(",", ""))

    assert ends("--budget", 100_000_000) < ends() < ends("--budget", 2_000_000_000)


@pytest.mark.parametrize(
    "args, said",
    [
        (["--ranks", 12, "--domain", 8], "--ranks 12 is not divisible by --domain 8"),
        (["--topk", 9, "--experts", 8, "--ranks", 8], "--topk 9 is more than --experts 8"),
        (["--hidden", 9], "--hidden 9 makes rows of 18 B (a multiple of 16)"),
        (["--set", "card_gbps"], "--set card_gbps is not of the form name=number"),
        (["--set", "card_gbps=fast"], "--set card_gbps=fast is not of the form name=number"),
        (["--set", "speed=1"], "--set speed is not one of link_gbps, "),
        (["--set", "proxies=0"], "--set proxies=0 is below 1"),
        (["--tables", "all"], "--tables"),
        (["--balance", 17], "--balance: 17 is not a number from 0 to 16"),
        (["--width", 8], "--width requires --balance"),
        (["--balance", 1, "--tflops", 0], "--tflops"),
        (["--sweep", "2,4", "routing.wrt"], "file excludes --ranks"),
    ],
)
def test_bad_usage_is_told(args, said):
    assert said in one_error(weft("simulate", *args, code=2))


def test_a_bad_model_names_file_and_field(tmp_path):
    path = tmp_path / "model.json"
    weft("simulate", "--calibrate", path)
    model = json.loads(path.read_text())
    model["values"]["card_gbps"]["value"] = 0
    path.write_text(json.dumps(model))
    error = one_error(weft("simulate", "--model", path, code=1))
    assert f"{path}: /values/card_gbps is 0 (at least 1e-09)" in error
    assert str(tmp_path / "none.json") in one_error(
        weft("simulate", "--model", tmp_path / "none.json", code=1)
    )
