# SPDX-License-Identifier: Apache-2.0
"""How the tests run the programs: WEFT_PROGRAM and WEFT_LAB_PROGRAM name them."""

import os
import subprocess

import pytest

PROGRAM = os.environ.get("WEFT_PROGRAM", "build/cpu/apps/weft/weft")
LAB = os.environ.get("WEFT_LAB_PROGRAM", "build/cpu/lab/weft-lab")
LAB_COMMANDS = ("train", "simulate")

# A sanitizer makes everything slower.
TIMEOUT = 120

# A model that trains some steps in a moment.
TINY_MODEL = "--window 4 --hidden 16 --expert-hidden 16 --blocks 2 --experts 4 --topk 2 --batch 32".split()
TINY = TINY_MODEL


def clean_environment(**extra):
    """Without what a launcher or a user's shell may have set."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WEFT_", "OMPI_", "SLURM_"))}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    return {**kept, "OPENBLAS_NUM_THREADS": "1", **extra}


def command_line(args):
    """`weft ...`, or `weft-lab ...` for a command of the laboratory."""
    return [LAB if args and args[0] in LAB_COMMANDS else PROGRAM, *map(str, args)]


def weft(*args, code=0, stdin=None, **extra):
    """Runs it in a pipe, checks the exit code, returns what it wrote."""
    command = command_line(args)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        input=stdin,
        env=clean_environment(**extra),
    )
    assert done.returncode == code, f"{command} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def start(*args, **extra):
    """Starts it and does not wait."""
    return subprocess.Popen(
        command_line(args),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(**extra),
    )


def one_error(done):
    """The only line on stderr."""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.fixture
def book(tmp_path):
    """Some kilobytes of text that a model can learn."""
    path = tmp_path / "book.txt"
    path.write_text("In the beginning was the word, and the word was short. " * 200)
    return path
