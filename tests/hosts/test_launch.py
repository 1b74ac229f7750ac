# SPDX-License-Identifier: Apache-2.0
"""Every command of docs/launch.md that is for several hosts, run as it stands there."""

import re
from pathlib import Path

import pytest

from conftest import PROGRAM
from job import LIMIT_S
from lab import Lab
from login import Login

PAGE = Path(__file__).resolve().parents[2] / "docs" / "launch.md"


def blocks():
    """Shell blocks of the section, in order; neighbours for different hosts are one step."""
    text = PAGE.read_text()
    section = text[text.index("\n## Several hosts\n") :]
    section = section[: section.index("\n## ", 1)]
    steps = []
    for block in re.findall(r"^```sh\n(.*?)^```$", section, re.M | re.S):
        if steps and block.startswith("# on host b") and steps[-1][-1].startswith("# on host a"):
            steps[-1].append(block)
        else:
            steps.append([block])
    return steps


@pytest.fixture(scope="module")
def login():
    """One for all steps; the first makes the secret that the others need."""
    with Lab(2) as made:
        ready = Login(made, PROGRAM)
        run(ready, blocks()[0])
        yield ready


def run(login, step):
    processes = [process for block in step for process in login.start(block)]
    said = [process.communicate(timeout=LIMIT_S) for process in processes]
    for process, (out, err) in zip(processes, said):
        assert process.returncode == 0, f"{step}\n{out}\n{err}"
    return "\n".join(out for out, _ in said)


def test_the_page_has_steps_for_every_launcher():
    text = str(blocks())
    for word in ("torchrun", "mpirun", "srun", "WEFT_RANK=1", "weft bench", "weft info --fabric"):
        assert word in text


@pytest.mark.parametrize("step", blocks(), ids=lambda step: step[0].split("\n")[-2][:24])
def test_the_step_works(login, step):
    said = run(login, step)
    command = "\n".join(step)
    if "weft check" in command:
        assert re.search(r"^[28] ranks$", said, re.M), said
        assert re.search(r"^(\d+) of \1 cases equal the reference", said, re.M), said
    if "weft bench" in command:
        assert re.search(r"^8 ranks over ", said, re.M), said
        assert re.search(r"^dispatch .* yes ", said, re.M), said
    if "weft info" in command:
        assert len(re.findall(r"chosen +tcp$", said, re.M)) == 2, said


def test_no_secret_is_on_a_command_line():
    for step in blocks():
        for block in step:
            assert not re.search(r"WEFT_SECRET=", block), block
