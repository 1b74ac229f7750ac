# SPDX-License-Identifier: Apache-2.0
"""`weft run`: programs in processes of their own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from consumer_imports import STATEMENTS, ask_for_deep_ep

from weft import run

# A program of one rank that was written for deep_ep.
PROGRAM = """
import os, sys, tempfile
import torch, torch.distributed as dist
import deep_ep

store = dist.FileStore(tempfile.mkdtemp() + "/store", 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
buffer = deep_ep.Buffer(dist.group.WORLD)
idx = torch.tensor([[0, 1], [1, -1]])
for _ in range(3):
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 2)
    x, _, _, _, handle, _ = buffer.dispatch(
        torch.ones(2, 8), topk_idx=idx, topk_weights=torch.ones(2, 2), num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
"""


NOBODY = "weft run: nobody called Weft (as deep_ep or nixl_ep or uccl)"


def weft_run(*arguments: str | bytes, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "weft", "run", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(command, text=True, timeout=100, check=False, **pipes | options)


def python(code: str) -> list[str]:
    return ["--", sys.executable, "-c", code]


def test_a_program_runs_over_weft_and_its_calls_are_told(tmp_path: Path):
    done = weft_run("--json", str(tmp_path / "counts.json"), *python(PROGRAM + "sys.exit(3)"))
    assert done.returncode == 3, done.stderr
    (told,) = json.loads((tmp_path / "counts.json").read_text()).values()
    assert told["calls"] == {"get_dispatch_layout": 3, "dispatch": 3}
    (group,) = told["groups"]
    assert group["ranks"] == [0] and group["num_plans"] == group["num_dispatches"] == 3
    assert done.stderr.splitlines()[-3:] == [
        "weft run: 1 process called Weft",
        "  get_dispatch_layout             3",
        "  dispatch                        3",
    ]


def test_processes_below_find_weft_and_tell_their_own_calls(tmp_path: Path):
    code = (
        PROGRAM
        + f"""
import atexit, subprocess
subprocess.run([sys.executable, "-c", {PROGRAM!r}], check=True)
for is_killed in (True, False):
    if os.fork() == 0:
        buffer.get_dispatch_layout(idx, 2)
        if is_killed:
            os.kill(os.getpid(), 9)
        atexit._run_exitfuncs()
        os._exit(0)  # threads of torch are not there
    os.wait()
"""
    )
    done = weft_run("--json", str(tmp_path / "counts.json"), *python(code))
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "counts.json").read_text()).values()
    found = [one["calls"] for one in told]
    usual = {"get_dispatch_layout": 3, "dispatch": 3}
    forked = {"get_dispatch_layout": 1}  # its first call was written at once
    assert sorted(found, key=len) == [forked, forked, usual, usual]
    assert sorted(len(one["groups"]) for one in told) == [0, 0, 1, 1]
    assert "weft run: 4 processes called Weft" in done.stderr


@pytest.mark.parametrize("seconds", [0, 1])
def test_what_a_killed_process_did_is_told(tmp_path: Path, seconds):
    code = PROGRAM + f"import time; time.sleep({seconds}); os.kill(os.getpid(), 9)"
    done = weft_run("--json", str(tmp_path / "counts.json"), *python(code))
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    (told,) = json.loads((tmp_path / "counts.json").read_text()).values()
    assert told["calls"] == {"get_dispatch_layout": 3, "dispatch": 3}
    if seconds > 0:
        (group,) = told["groups"]
        assert group["num_dispatches"] == 3 and len(group["wait_seconds"]) == 1


RANKS = """
import time
import torch, torch.distributed as dist
import deep_ep

dist.init_process_group("gloo")
buffer = deep_ep.Buffer(dist.group.WORLD)
idx = torch.tensor([[0, 1]])
for _ in range(3):
    time.sleep(0.3 * dist.get_rank())  # rank 1 is the slow one
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 2)
    buffer.dispatch(
        torch.ones(1, 8), topk_idx=idx, topk_weights=torch.ones(1, 2), num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
dist.barrier()
dist.destroy_process_group()
"""


def test_the_rank_that_others_waited_for_is_named_and_shown(tmp_path: Path):
    (tmp_path / "ranks.py").write_text(RANKS)
    torchrun = ["--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    page = tmp_path / "waits.html"
    done = weft_run("--html", str(page), *torchrun, "--standalone", str(tmp_path / "ranks.py"))
    assert done.returncode == 0, done.stderr
    *_, calls, _, waits = done.stderr.splitlines()
    assert calls.split() == ["get_dispatch_layout", "6"]
    assert waits.startswith("  2 ranks waited ") and waits.endswith(" for rank 1")
    text = page.read_text()
    assert text.count("<tr>") == 2 + 3 and "ranks.py" in text
    assert 'style="--share: 1.000"' in text


def test_chosen_names_are_weft_and_others_are_not():
    code = "import uccl.ep, importlib.util as u; print(uccl.ep.__file__, u.find_spec('deep_ep'))"
    done = weft_run("--as", "uccl", *python(code))
    assert done.returncode == 0, done.stderr
    file, spec = done.stdout.split()
    assert file.endswith("weft/compat/uccl/ep.py") and spec == "None"
    assert done.stderr.splitlines()[-1] == "weft run: nobody called Weft (as uccl)"


def test_deep_ep_is_found_by_the_name_of_its_second_version():
    code = "from deep_ep_v2 import EPBuffer; import deep_ep; print(EPBuffer is deep_ep.EPBuffer)"
    done = weft_run("--as", "deep_ep", *python(code))
    assert "True" in done.stdout.splitlines()


def test_programs_find_what_they_import():
    apart = ("moonep", "transformer_engine")  # it stands for these if it is told to
    below = [line for line in STATEMENTS if not any(name in line for name in apart)]
    done = weft_run(*python(ask_for_deep_ep() + "\n".join(below)))
    assert done.returncode == 0, done.stderr


def test_a_signal_is_told_as_shells_do():
    assert weft_run(*python("import os; os.kill(os.getpid(), 9)")).returncode == 128 + 9


@pytest.mark.parametrize("number", ["TERM", "HUP", "USR1", "USR2"])
def test_signals_reach_the_command(number):
    program = f"trap 'exit 9' {number}; echo ready; while :; do sleep 0.05; done"
    command = [sys.executable, "-m", "weft", "run", "--", "sh", "-c", program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, preexec_fn=hear_hangups, **pipes) as run:
        try:
            assert run.stdout.readline() == b"ready\n"
            run.send_signal(signal.Signals[f"SIG{number}"])
            assert run.wait(100) == 9
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)


def test_what_is_ignored_stays_ignored():
    program = "kill -HUP $$; kill -HUP $PPID; exit 9"
    done = weft_run(*"-- sh -c".split(), program, preexec_fn=ignore_hangups)
    assert done.returncode == 9, done.stderr


def hear_hangups() -> None:
    """Also where the tests run below nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def ignore_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_reports_that_cannot_be_written_hide_no_exit_code(tmp_path: Path):
    failing = ["--", "sh", "-c", "exit 7"]
    with open("/dev/full", "w") as full:
        assert weft_run(*failing, stderr=full).returncode == 7
    for option in ("--json", "--html"):
        done = weft_run(option, "/dev/full", *failing)
        assert done.returncode == 7
        said = ["weft run: /dev/full cannot be written: No space left on device", NOBODY]
        assert done.stderr.splitlines() == said
    page = tmp_path / "page.html"
    assert weft_run("--html", str(page), *failing, b"\xff\x1b").returncode == 7
    assert "exit 7 \\udcff\\x1b</h1>" in page.read_text()


def test_what_a_process_tells_wrongly_is_left_out():
    program = 'echo "[" > $WEFT_RUN_COUNTS/1.json; mkdir $WEFT_RUN_COUNTS/2.json; exit 7'
    done = weft_run("--", "sh", "-c", program)
    assert done.returncode == 7
    first, second, last = done.stderr.splitlines()
    assert first.startswith("weft run: 1.json: ") and second.startswith("weft run: 2.json: ")
    assert last == NOBODY


def test_a_file_that_is_no_program(tmp_path: Path):
    (tmp_path / "text").write_text("no program\n")
    (tmp_path / "text").chmod(0o755)
    done = weft_run("--", str(tmp_path / "text"))
    assert done.returncode == 126
    assert done.stderr == f"weft run: '{tmp_path}/text' cannot be run: Exec format error\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--", "no-such-program"], 127, "'no-such-program' not found"),
        (
            ["--as", "deep_ep,nccl", "--", "true"],
            2,
            "'nccl' is unknown (expected some of deep_ep, nixl_ep, uccl)",
        ),
        ([], 2, "there is no command"),
        (["--json", "/no/such/folder/a", "--", "true"], 2, "/no/such/folder/a cannot be written"),
    ],
)
def test_what_cannot_be_run_is_named(arguments, status, message, capsys):
    try:
        found = run.main(arguments)
    except SystemExit as end:
        found = end.code
    assert found == status
    assert message in capsys.readouterr().err


def test_the_plug_in_of_vllm_does_nothing_elsewhere(monkeypatch):
    monkeypatch.delenv("WEFT_RUN_AS", raising=False)
    before = set(sys.modules)
    run.vllm_plugin()
    assert set(sys.modules) == before
