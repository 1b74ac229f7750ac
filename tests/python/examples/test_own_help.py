# SPDX-License-Identifier: Apache-2.0
"""Every example as its own help says it."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import weft.examples

FOLDER = Path(weft.examples.__file__).parent
QUICK = {"qwen3_moe": "--steps 1 --warmup 0 --modes weft weft-budget"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LAUNCHERS = {"python": [sys.executable], "torchrun": TORCHRUN}


def commands():
    for file in sorted(FOLDER.glob("*.py")):
        help_text = ast.get_docstring(ast.parse(file.read_text())) or ""
        for line in help_text.splitlines():
            if line.split(" ")[0] in LAUNCHERS:
                yield line


def name_of(command):
    return command.split("weft.examples.")[1].split()[0]


def test_every_program_among_them_is_run():
    programs = {file.stem for file in FOLDER.glob("*.py") if "__main__" in file.read_text()}
    assert programs == set(map(name_of, commands()))


def run(words, folder):
    settings = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env={**os.environ, **settings},
    )


@pytest.mark.parametrize("command", commands())
def test_it_does_what_its_help_says(command, tmp_path):
    launcher, *words = f"{command} {QUICK.get(name_of(command), '')}".split()
    shutil.copy(__file__, tmp_path / "book.txt")
    done = run([*LAUNCHERS[launcher], *words], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_failure_is_told_once(tmp_path):
    words = "-m weft.examples.qwen3_moe --gpus 2 --device cpu --modes weft-budget --steps 1"
    done = run([sys.executable, *words.split(), "--capacity", "0.5"], tmp_path)
    assert done.returncode == 1
    assert done.stdout.endswith("weft-budget: tokens were dropped (try a larger --capacity)\n")
    assert done.stderr == ""
