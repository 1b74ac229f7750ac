# SPDX-License-Identifier: Apache-2.0
"""`weft-lab train`: it learns, reports, saves and goes on."""

import itertools
import json
import os
import signal
import time

import pytest

from conftest import TIMEOUT, TINY, one_error, start, weft


def losses(path):
    return [step["loss"] for step in json.loads(path.read_text())["steps"]]


def train(book, numbers, *args):
    done = weft("train", book, *TINY, "--json", numbers, *args)
    return losses(numbers), done.stdout


def wait_for(path, process, deadline=TIMEOUT):
    end = time.monotonic() + deadline
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.01)


def test_the_loss_falls(tmp_path, book):
    values, _ = train(book, tmp_path / "run.json", "--ranks", 2, "--steps", 60)
    assert len(values) == 60
    assert sum(values[-10:]) < 0.8 * sum(values[:10])


@pytest.mark.parametrize("how", ["--processes", "--threads"])
def test_the_same_seed_gives_the_same_loss(tmp_path, book, how):
    runs = [train(book, tmp_path / "run.json", "--ranks", 2, "--steps", 5, how)[0] for _ in range(2)]
    assert runs[0] == runs[1]


def test_tables_say_where_time_and_bytes_went(tmp_path, book):
    _, text = train(book, tmp_path / "run.json", "--ranks", 4, "--steps", 3)
    for phase in ("dense", "route", "plan", "dispatch", "experts", "combine", "optimizer"):
        assert f"\n{phase} " in text
    assert "of limit" in text
    assert "Load per expert" in text
    assert "Done after step 3" in text
    assert "\r" not in text and "\x1b" not in text


def test_numbers_add_up(tmp_path, book):
    numbers = tmp_path / "run.json"
    train(book, numbers, "--ranks", 2, "--steps", 4)
    run = json.loads(numbers.read_text())
    assert run["num_tokens"] == 4 * 32
    for op in ("dispatch", "combine"):
        assert 0 < run[op]["wire_bytes"] < run[op]["logical_bytes"]
        assert run[op]["percent_of_limit"] > 0
    assert sum(run["phase_seconds"].values()) <= run["seconds"] * 1.01


def test_page_has_every_picture(tmp_path, book):
    page = tmp_path / "run.html"
    weft("train", book, *TINY, "--ranks", 2, "--steps", 3, "--html", page)
    text = page.read_text()
    # Loss, time per phase, imbalance, and the load of both blocks.
    assert text.count("<svg") == text.count("</svg>") == 5
    assert "Loss" in text and "Load per expert, block 1" in text
    assert "<script" not in text and "src=" not in text


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path, book, dtype):
    numbers = tmp_path / "run.json"
    args = ["--ranks", 2, "--dtype", dtype]
    whole, _ = train(book, numbers, *args, "--steps", 6)
    kept = ["--checkpoint", tmp_path / "model.ckpt"]
    first, _ = train(book, numbers, *args, *kept, "--steps", 4)
    second, text = train(book, numbers, *args, *kept, "--steps", 6, "--resume")
    assert first + second == whole
    assert "Done after step 6" in text


def test_a_run_that_is_complete_has_nothing_to_do(tmp_path, book):
    args = ["train", book, *TINY, "--ranks", 2, "--steps", 2, "--checkpoint", tmp_path / "model.ckpt"]
    weft(*args)
    assert "Nothing to do: 2 steps are done already" in weft(*args, "--resume").stdout


def test_a_resumed_run_appends_to_its_routing(tmp_path, book):
    steps = tmp_path / "steps.wrt"
    args = ["train", book, *TINY, "--ranks", 2]
    args += ["--checkpoint", tmp_path / "model.ckpt", "--save-routing", steps]
    weft(*args, "--steps", 2)
    weft(*args, "--steps", 3, "--resume")
    assert "step 1, layer 0" in weft("plan", steps, "--step", 1).stdout
    assert "step 3, layer 0" in weft("plan", steps).stdout


def test_a_checkpoint_is_overwritten_only_if_that_is_asked_for(tmp_path, book):
    kept = tmp_path / "model.ckpt"
    args = ["train", book, *TINY, "--ranks", 2, "--steps", 2, "--checkpoint", kept]
    weft(*args)
    before = kept.read_bytes()
    assert f"--checkpoint {kept}: it holds 2 steps" in one_error(weft(*args, code=2))
    assert kept.read_bytes() == before
    weft(*args, "--seed", 7, "--overwrite")
    assert kept.read_bytes() != before
    kept.write_text("something that nobody may lose")
    assert "no checkpoint" in one_error(weft(*args, code=2))
    assert kept.read_text().startswith("something")


def test_outputs_neither_replace_the_text_nor_each_other(tmp_path, book):
    before = book.read_bytes()
    link = tmp_path / "link"
    link.symlink_to(book)
    for option in ("--checkpoint", "--save-routing", "--html", "--json"):
        for path in (book, link):
            args = ["train", book, *TINY, "--steps", 1, option, path]
            assert f"{option} would replace" in one_error(weft(*args, code=2))
    both = tmp_path / "both"
    args = ["train", book, *TINY, "--steps", 1, "--html", both, "--json", both]
    assert "would replace" in one_error(weft(*args, code=2))
    assert book.read_bytes() == before and not both.exists()


def test_a_checkpoint_replaces_no_device(book):
    args = ["train", book, *TINY, "--ranks", 2, "--steps", 1, "--checkpoint", "/dev/null"]
    assert "no regular file" in one_error(weft(*args, code=1))
    assert os.stat("/dev/null").st_mode & 0o170000 == 0o020000


def test_what_does_not_fit_into_memory_is_refused(book):
    sizes = ["--experts", 65536, "--blocks", 1024, "--hidden", 65536, "--expert-hidden", 65536]
    error = one_error(weft("train", book, *sizes, code=1))
    assert "no room for" in error and "available" in error
    assert "num_experts = 1000000 (at most 65536)" in one_error(
        weft("train", book, "--experts", 1000000, code=2)
    )
    error = one_error(weft("train", "/dev/zero", *TINY, code=1))
    assert "read: /dev/zero: it is a device (expected a file or a pipe)" in error
    assert "-1" in one_error(weft("train", book, *TINY, "--seed", -1, code=2))


def test_seconds_end_a_run(tmp_path, book):
    started = time.monotonic()
    weft("train", book, *TINY, "--ranks", 2, "--seconds", 0.5)
    assert time.monotonic() - started >= 0.5


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_leaves_a_whole_checkpoint(tmp_path, book, signal_number):
    kept = tmp_path / "model.ckpt"
    args = ["train", book, *TINY, "--ranks", 2, "--checkpoint", kept]
    process = start(*args, "--seconds", 300, "--checkpoint-every", 3)
    wait_for(kept, process)
    process.send_signal(signal_number)
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err
    assert "Stopped by a signal after step" in out
    last = int(out.split("Stopped by a signal after step ")[1].split(",")[0])
    text = weft(*args, "--resume", "--steps", last + 1).stdout
    assert f"Done after step {last + 1}" in text
    assert [path.name for path in tmp_path.iterdir() if path != book] == ["model.ckpt"]


def micro_batched(tmp_path, book, micro_batches, ranks, *args):
    """Losses of three steps, and what the checkpoint after them holds."""
    kept = tmp_path / "model.ckpt"
    args = ["--micro-batches", micro_batches, "--ranks", ranks, "--checkpoint", kept, *args]
    args.append("--overwrite")
    values, _ = train(book, tmp_path / "run.json", "--steps", 3, *args)
    return values, kept.read_bytes()


@pytest.mark.parametrize("micro_batches", [2, 3, 4])
def test_overlap_changes_no_bit(tmp_path, book, micro_batches):
    expected = micro_batched(tmp_path, book, micro_batches, 1)
    assert len(expected[0]) == 3
    runs = itertools.product((1, 2, 4), ([], ["--overlap"], ["--overlap", "--delay-wgrad"]))
    for ranks, args in itertools.islice(runs, 1, None):  # the first one is what is expected
        assert micro_batched(tmp_path, book, micro_batches, ranks, *args) == expected, (ranks, args)


@pytest.mark.parametrize("how", ["--processes", "--threads"])
def test_overlap_changes_no_bit_in_bf16(tmp_path, book, how):
    args = [tmp_path, book, 4, 2, "--dtype", "bf16", how]
    expected = micro_batched(*args)
    assert micro_batched(*args, "--overlap") == expected
    assert micro_batched(*args, "--overlap", "--delay-wgrad") == expected


def test_one_micro_batch_is_the_whole_batch(tmp_path, book):
    whole, _ = train(book, tmp_path / "run.json", "--ranks", 2, "--steps", 3)
    assert micro_batched(tmp_path, book, 1, 2)[0] == whole
    # Another order of sums, from the second step on in the parameters too.
    assert micro_batched(tmp_path, book, 4, 2)[0] == pytest.approx(whole, rel=0.01)


def test_overlapped_runs_say_what_was_hidden(tmp_path, book):
    numbers, page, trace = tmp_path / "run.json", tmp_path / "run.html", tmp_path / "trace.json"
    args = ["--ranks", 2, "--steps", 3, "--overlap", "--delay-wgrad"]
    _, text = train(book, numbers, *args, "--html", page, "--trace", trace)
    assert "in 4 micro-batches that overlap, weight gradients delayed" in text
    assert "\nexchange alone " in text and "of the exchange had no computation beside it" in text
    assert f"Trace: {trace}" in text

    run = json.loads(numbers.read_text())
    assert run["config"]["micro_batches"] == 4 and run["config"]["overlap"]
    lanes = run["lanes"]
    assert 0 < lanes["exposed_seconds"] <= lanes["exchange_seconds"]
    assert lanes["compute_seconds"] + lanes["exposed_seconds"] <= lanes["seconds"] * 1.001
    assert lanes["seconds"] < run["seconds"]
    phases = run["phase_seconds"]
    exchange = phases["plan"] + phases["dispatch"] + phases["combine"]
    assert 0 < exchange <= lanes["exchange_seconds"]
    assert 0 < phases["experts"] <= lanes["compute_seconds"]

    # One bar for each piece of the last step, on both lanes.
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    moves = [e for e in events if e["cat"] == "exchange"]
    assert len(moves) == 4 * 2 * 4  # micro-batches, blocks, dispatches and combines
    assert [e["name"] for e in moves] == [
        e["name"] for e in sorted(moves, key=lambda e: e["args"]["step"])
    ]
    assert {e["args"]["micro_batch"] for e in moves} == {0, 1, 2, 3}
    assert sum("backward_dw" in e["name"] for e in events) == 4 * 2
    picture = page.read_text()
    assert picture.count("<svg") == picture.count("</svg>") == 6
    for event in events:
        if event["dur"] > 0:
            assert f"<title>{event['name']}: " in picture


def test_a_resumed_run_may_overlap(tmp_path, book):
    numbers = tmp_path / "run.json"
    args = ["--ranks", 2, "--micro-batches", 2]
    whole, _ = train(book, numbers, *args, "--steps", 4)
    kept = ["--checkpoint", tmp_path / "model.ckpt"]
    first, _ = train(book, numbers, *args, *kept, "--steps", 2)
    second, _ = train(book, numbers, *args, *kept, "--steps", 4, "--resume", "--overlap")
    assert first + second == whole


def test_overlapped_routing_is_saved_whole(tmp_path, book):
    files = [tmp_path / "cut.wrt", tmp_path / "overlapped.wrt"]
    args = ["train", book, *TINY, "--ranks", 2, "--steps", 2, "--micro-batches", 3]
    weft(*args, "--save-routing", files[0])
    weft(*args, "--save-routing", files[1], "--overlap")
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "step 2, layer 0" in weft("plan", files[1]).stdout


@pytest.mark.parametrize(
    "args, problem",
    [
        (["--micro-batches", 0], "--micro-batches"),
        (["--micro-batches", 33], "num_micro_batches = 33 (at most global_batch, 32)"),
        (["--micro-batches", 1, "--overlap"], "num_micro_batches = 1 with overlap (at least 2"),
        (["--delay-wgrad"], "--delay-wgrad requires --overlap"),
        (["--trace", "trace.json"], "--trace requires --overlap"),
    ],
)
def test_overlap_that_cannot_be_is_refused(book, args, problem):
    assert problem in weft("train", book, *TINY, "--ranks", 2, "--steps", 1, *args, code=2).stderr


def test_launched_ranks_with_other_options_are_named(book, tmp_path):
    port = 20000 + os.getpid() % 10000  # below those that the system gives to others by itself
    routing = ["--save-routing", tmp_path / "run.wrt"]
    ranks = [
        start("train", book, *TINY, *more, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        for rank, more in enumerate([[*routing, "--steps", "2"], ["--steps", "2"]])
    ]
    values = ["1 here and 0 on rank 1", "0 here and 1 on rank 0"]
    for process, value in zip(ranks, values, strict=True):
        error = process.communicate(timeout=TIMEOUT)[1]
        assert process.returncode == 1
        assert f"--routing-every (with --save-routing) = {value}" in error
    assert not (tmp_path / "run.wrt").exists()


@pytest.mark.parametrize("how", [["--processes"], ["--threads"], ["--overlap"], ["--overlap", "--delay-wgrad"]], ids=" ".join)
def test_replicas_make_ranks_even_and_keep_the_loss(tmp_path, book, how):
    args = ("--ranks", 4, "--steps", 10, *how)
    plain, _ = train(book, tmp_path / "plain.json", *args)
    values, text = train(book, tmp_path / "run.json", *args, "--replicas", 2)
    assert values == pytest.approx(plain, rel=1e-5)
    balance = json.loads((tmp_path / "run.json").read_text())["balance"]
    assert 1 <= balance["max_over_mean"] < balance["unbalanced_max_over_mean"]
    assert "The busiest rank had" in text
