# SPDX-License-Identifier: Apache-2.0
"""All of run.py that needs no GPU: pieces, trimmed libraries, comparisons, and what befalls
engines, which are those of a vLLM that is made up."""

import json
import random
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import carry
from vllm_gpu import compare, fat_binaries, run

HERE = Path(__file__).resolve().parent
ENGINES = HERE.parent / "vllm_whole/engines.py"
VLLM = """
import os, signal, time
from types import SimpleNamespace as One
SamplingParams = One
continued = []
signal.signal(signal.SIGCONT, lambda *_: continued.append(1))
class LLM:
    def __init__(self, **options):
        assert options["skip_tokenizer_init"] and options["model"] == "none"
    def generate(self, prompts, params, use_tqdm):
        is_first = os.environ["VLLM_DP_RANK"] == "0"
        while not is_first and not continued:  # the second answers once it was stopped
            time.sleep(0.1)
        continued.clear()
        if params.max_tokens == 2 and is_first:
            time.sleep(99)
        if params.max_tokens == 1:
            raise RuntimeError("the other engine is gone")
        def outputs(prompt):
            tokens = [sum(prompt["prompt_token_ids"]) + i for i in range(params.max_tokens)]
            best = [{one + 1: One(logprob=-2.0), one: One(logprob=-1.0)} for one in tokens]
            return [One(token_ids=tokens, logprobs=best if params.logprobs else None)]
        return [One(outputs=outputs(prompt)) for prompt in prompts]
"""


def fat_binary(*parts):
    """A fat binary of parts (kind, architecture, bytes)."""
    body = b"".join(
        struct.pack("<HHIQ12xI", kind, 1, 64, len(code), architecture).ljust(64, b"h") + code
        for kind, architecture, code in parts
    )
    return struct.pack("<IHHQ", fat_binaries.MAGIC, 1, 16, len(body)) + body


def test_code_of_other_architectures_becomes_zeros(tmp_path):
    library = tmp_path / "one.so"
    constant = struct.pack("<IHH", fat_binaries.MAGIC, 0, 7)
    mine = fat_binary((2, 80, b"a" * 24), (2, 90, b"b" * 40), (1, 90, b"c" * 8))
    by_ptx = fat_binary((1, 70, b"d" * 8), (1, 80, b"e" * 16), (1, 100, b"f" * 8))
    whole = b"begin" + constant + mine + b"between" + by_ptx + b"end"
    library.write_bytes(whole)
    assert fat_binaries.trim(library, 90) == 24 + 8 + 8 + 8
    wanted = whole
    for gone in (b"a" * 24, b"c" * 8, b"d" * 8, b"f" * 8):
        wanted = wanted.replace(gone, bytes(len(gone)))
    assert library.read_bytes() == wanted


@pytest.fixture
def judged(capsys):
    """Runs run.py in this process: its status, and what it prints."""

    def judge(pieces, work, *more):
        words = ["--pieces", pieces, "--work", work, "--results", work / "out/results.json"]
        status = run.main([str(word) for word in (*words, "--commit", "abc", *more)])
        return status, capsys.readouterr().out

    return judge


def test_pieces_are_the_files_again(judged, tmp_path):
    site, pieces, work = (tmp_path / name for name in ("site", "pieces", "work"))
    for folder in (site / "deep", pieces):
        folder.mkdir(parents=True)
    bits = random.Random(1).randbytes(30_000)
    (site / "deep/library.so").write_bytes(bits)
    (site / "module.py").write_text("one = 1\n")
    with zipfile.ZipFile(pieces / "weft-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("weft/module.py", "two = 2\n")
    carry.split(site, pieces, piece_bytes=10_000)
    assert len(list(pieces.glob("site.tar.xz.*"))) == 4
    assert max(path.stat().st_size for path in pieces.iterdir()) <= 10_000
    (pieces / "site.tar.xz.02").rename(tmp_path / "late")
    status, out = judged(pieces, work)
    assert status == 1 and "assemble  " in out and "site.tar.xz.02: FAILED" in out
    (tmp_path / "late").rename(pieces / "site.tar.xz.02")
    status, out = judged(pieces, work)  # the check then finds no vLLM
    assert status == 1 and "No module named 'vllm'" in out
    assert (work / "site/deep/library.so").read_bytes() == bits
    assert (work / "site/module.py").read_text() == "one = 1\n"
    assert (work / "site/weft/module.py").read_text() == "two = 2\n"
    assert (work / "out/results.logs.tar.xz").exists()


def answer(*tokens, second=(), gap=1.0):
    """Tokens, each with another just below it."""
    others = dict(zip(range(len(tokens)), second)) if second else {}
    best = [[[t, -1.0], [others.get(at, t + 1), -1.0 - gap]] for at, t in enumerate(tokens)]
    return [list(tokens), best]


@pytest.mark.parametrize(
    ("got", "near_ties", "differences", "same_tokens"),
    [
        (answer(5, 6, 7), 0, 0, 3),
        (answer(5, 6, 7, 8, 9), 0, 0, 3),
        (answer(5, 9, 7), 1, 0, 1),
        (answer(5, 6, 90), 0, 1, 2),
    ],
)
def test_only_near_ties_may_part(got, near_ties, differences, same_tokens):
    found = compare.compare([answer(5, 6, 7, second=(6, 9, 8), gap=0.125)], [got])
    row = found.row()
    assert (row["near_ties"], row["differences"]) == (near_ties, differences)
    assert (found.same_tokens, found.same_bits, found.largest) == (same_tokens, same_tokens, 0)
    assert found.differs == bool(differences)


def test_second_choices_that_are_far_are_differences():
    found = compare.compare([answer(5, second=(9,), gap=0.5)], [answer(9)])
    assert found.differs and str(found.partings[0]).startswith("DIFFERS: prompt 0, step 0: 5 or 9")


def done_before(work, **ways):
    """A folder in which run.py finds everything done, the ways with such answers."""
    work.mkdir()
    for name in ("assemble", "check", "model"):
        (work / f"{name}.done").touch()
    for way in run.WAYS:
        answered = ways.get(way.replace("-", "_"), answer(5, 6, 7, second=(6, 9, 8), gap=0.125))
        told = {"greedy": {"seconds": [1, 2], "answers": [[answered], [answered]]}}
        told |= {f"decode {i}": {"seconds": [4, i], "answers": [[], []]} for i in range(3)}
        (work / f"{way}.answers.json").write_text(json.dumps(told))
        (work / f"{way}.state.json").write_text('{"good": true}')
        (work / f"{way}.calls.json").write_text('{"1": {"calls": {"dispatch": 3}}}')


def test_ways_are_printed(judged, tmp_path):
    status, out = judged(tmp_path, tmp_path / "none", "--dry-run")
    assert status == 0 and not (tmp_path / "none").exists()
    for way in run.WAYS:
        (line,) = (line for line in out.splitlines() if line.startswith(f"{way}:"))
        assert ("weft run --as deep_ep" in line) == ("default" not in way)
        assert ("VLLM_BATCH_INVARIANT=1" in line) == ("invariant" in way)


def test_the_judgement(judged, tmp_path):
    done_before(tmp_path / "good", low_latency=answer(5, 9, 1))
    status, out = judged(tmp_path, tmp_path / "good")
    assert status == 0, out
    assert "low-latency, greedy: near tie: prompt 0, step 1: 6 or 9, 0.1250 apart" in out
    told = json.loads((tmp_path / "good/out/results.json").read_text())
    rows = {row["mode"]: row for row in told["rows"]}
    assert told["commit"] == "abc" and list(rows) == list(run.WAYS)
    assert rows["low-latency"]["near_ties"] == 2 and rows["low-latency"]["decode_tps"] == 128 * 32

    (tmp_path / "good/high-throughput.state.json").unlink()
    status, out = judged(tmp_path, tmp_path / "good", "--seconds", "9")
    assert status == 75 and "next call: high-throughput\n" in out


def test_a_difference_is_named(judged, tmp_path):
    done_before(tmp_path / "bad", high_throughput=answer(5, 6, 1))
    status, out = judged(tmp_path, tmp_path / "bad")
    assert status == 1 and "DIFFERS: prompt 1, step 2: 7 or 1" in out


def test_a_way_without_weft_is_none(judged, tmp_path):
    done_before(tmp_path / "uncounted")
    (tmp_path / "uncounted/low-latency.calls.json").write_text('{"1": {"calls": {}}}')
    status, out = judged(tmp_path, tmp_path / "uncounted")
    assert status == 1 and "low-latency: no call of Weft was counted" in out


@pytest.mark.parametrize(
    ("num_tokens", "patience", "first"), [(1, 60, "ended"), (2, 1, "hung"), (3, 60, "answered")]
)
def test_what_befalls_engines(tmp_path, num_tokens, patience, first):
    (tmp_path / "vllm.py").write_text(VLLM)
    prompts = [[[3, 4], [5]], [[6]]]
    late = {"name": "late", "prompts": prompts, "tokens": 4, "best": 2, "pause": 1}
    killed = {"name": "killed", "prompts": prompts, "tokens": num_tokens, "kill": patience}
    plan = {"options": {"model": "none"}, "port": 1, "tasks": [late, killed]}
    (tmp_path / "plan").write_text(json.dumps(plan))
    command = [sys.executable, ENGINES, tmp_path / "plan", tmp_path / "answers"]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, timeout=100)
    assert done.returncode == (first == "hung")
    told = json.loads((tmp_path / "answers").read_text())
    (of_first, of_second) = told["late"]["answers"]
    assert [tokens for tokens, _ in of_first] == [[7, 8, 9, 10], [5, 6, 7, 8]]
    assert of_second == [[[6, 7, 8, 9], [[[t, -1.0], [t + 1, -2.0]] for t in (6, 7, 8, 9)]]]
    assert told["killed"]["first"] == first
    assert told["killed"]["answers"][1] is None
