# SPDX-License-Identifier: Apache-2.0
"""Missing, empty, truncated and foreign files: one error that names the file and the place."""

import json
import os
import resource
import subprocess

import pytest

from conftest import PROGRAM, TIMEOUT, TINY, clean_environment, one_error, weft


@pytest.fixture
def steps(tmp_path, book):
    path = tmp_path / "steps.wrt"
    weft("train", book, *TINY, "--ranks", 2, "--steps", 2, "--save-routing", path)
    return path


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "plan.json"
    weft("plan", "--tokens", 16, "--save", path)
    return path


@pytest.fixture
def checkpoint(tmp_path, book):
    path = tmp_path / "model.ckpt"
    weft("train", book, *TINY, "--ranks", 2, "--steps", 1, "--checkpoint", path)
    return path


def refusal(*args):
    return one_error(weft(*args, code=1))


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "nowhere"
    for args in (["plan", path], ["train", path], ["plan", "--tokens", 8, "--compare", path]):
        error = refusal(*args)
        assert str(path) in error
        assert "No such file" in error


def test_a_folder_is_no_file(tmp_path):
    assert str(tmp_path) in refusal("plan", tmp_path)


def test_an_empty_file_is_named(tmp_path):
    path = tmp_path / "empty"
    path.touch()
    assert f"{path}" in refusal("plan", path)
    assert "empty" in refusal("plan", path)
    assert f"{path}" in refusal("train", path)


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "foreign"
    path.write_text("Dear reader, this is no routing at all, whatever you may hope.\n" * 9)
    error = refusal("plan", path)
    assert str(path) in error
    assert "not a routing file" in error


def test_a_truncated_routing_file_names_the_byte(steps):
    whole = steps.read_bytes()
    for size in (9, len(whole) // 2, len(whole) - 1):
        steps.write_bytes(whole[:size])
        error = refusal("plan", steps)
        assert str(steps) in error
        assert "byte" in error


def test_a_flipped_bit_in_a_routing_file_is_noticed(steps):
    whole = bytearray(steps.read_bytes())
    whole[-5] ^= 4
    steps.write_bytes(whole)
    assert str(steps) in refusal("plan", steps)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text[: len(text) // 2], "byte"),
        (lambda text: "{}", "/format"),
        (lambda text: text.replace('"num_ranks":4', '"num_ranks":-4'), "/shape/num_ranks"),
        (lambda text: text.replace('"num_rows":', '"rows":'), "/output/num_rows"),
    ],
)
def test_a_damaged_plan_names_the_place(saved, change, expected):
    saved.write_text(change(saved.read_text()))
    error = refusal("plan", saved)
    assert str(saved) in error
    assert expected in error


def test_a_checkpoint_is_no_plan_and_a_plan_no_checkpoint(saved, checkpoint, book):
    assert str(checkpoint) in refusal("plan", checkpoint)
    error = refusal("train", book, *TINY, "--steps", 2, "--checkpoint", saved, "--resume")
    assert str(saved) in error
    assert "not a checkpoint" in error


def test_a_truncated_checkpoint_is_refused(checkpoint, book):
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    args = ["train", book, *TINY, "--ranks", 2, "--steps", 2, "--checkpoint", checkpoint, "--resume"]
    assert str(checkpoint) in refusal(*args)


def test_a_checkpoint_of_another_model_says_what_differs(checkpoint, book):
    args = ["train", book, *TINY, "--ranks", 2, "--steps", 2, "--checkpoint", checkpoint, "--resume"]
    error = refusal(*args, "--seed", 99)
    assert str(checkpoint) in error
    assert "seed" in error and "99" in error


def test_a_text_shorter_than_the_window_is_refused(tmp_path):
    path = tmp_path / "short"
    path.write_text("abc")
    error = refusal("train", path, *TINY)
    assert f"{path} holds 3 B" in error


def test_a_file_that_cannot_be_written_is_named(tmp_path, book):
    path = tmp_path / "missing" / "file"
    tiny = ["train", book, *TINY, "--ranks", 2, "--steps", 1]
    for args in (
        ["plan", "--tokens", 8, "--html", path],
        ["plan", "--tokens", 8, "--save", path],
        [*tiny, "--save-routing", path],
        [*tiny, "--checkpoint", path],
    ):
        assert str(path) in refusal(*args)
    assert not path.parent.exists()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["plan", "{}", "--save", "{}"], "--save would replace"),
        (["plan", "{}", "--compare", "{}", "--save", "{}"], "--save would replace"),
        (["plan", "--save", "{}", "--html", "{}"], "--html would replace"),
        (["bench", "--json", "{}", "--html", "{}"], "--html would replace"),
    ],
)
def test_no_output_replaces_an_input_or_another_output(saved, args, expected):
    before = saved.read_bytes()
    link = saved.parent / "link.json"
    link.symlink_to(saved)
    paths = iter([saved, link, saved])
    args = [next(paths) if arg == "{}" else arg for arg in args]
    assert expected in one_error(weft(*args, code=2))
    assert saved.read_bytes() == before


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("bench --smoke", "--json --html"),
        ("plan --tokens 8", "--html --save"),
        ("train BOOK --ranks 2 --seconds 300 --overlap", "--json --html --trace --save-routing --checkpoint"),
        ("simulate --ranks 8", "--json"),
    ],
)
def test_outputs_are_tried_before_the_work(tmp_path, book, command, options):
    path = tmp_path / "missing" / "out"
    args = [str(book) if word == "BOOK" else word for word in command.split()]
    more = TINY if args[0] == "train" else []
    for option in options.split():
        done = weft(*args, *more, option, path, code=1)
        assert str(path) in one_error(done) and "No such file" in done.stderr
        assert done.stdout == ""


def test_a_full_disk_leaves_the_old_file_whole(saved):
    """A limit on file sizes stands for the full disk."""
    before = saved.read_bytes()
    done = subprocess.run(
        [PROGRAM, "plan", "--tokens", "64", "--save", saved],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=clean_environment(),
        restore_signals=False,  # keeps SIGXFSZ ignored: writing fails instead
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert done.returncode == 1
    assert str(saved) in one_error(done)
    assert "File too large" in done.stderr
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = subprocess.Popen(["cat", path], stdout=subprocess.PIPE, text=True)
    weft("plan", "--tokens", 8, "--save", path)
    text, _ = reader.communicate(timeout=TIMEOUT)
    assert json.loads(text)["shape"]["num_tokens"] == 8
    assert path.is_fifo()


def test_json_of_a_run_is_valid(tmp_path, book):
    path = tmp_path / "run.json"
    weft("train", book, *TINY, "--ranks", 2, "--steps", 2, "--json", path)
    run = json.loads(path.read_text())
    assert run["last_step"] == 2
    assert len(run["steps"]) == 2
