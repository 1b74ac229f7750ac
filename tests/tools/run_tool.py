# SPDX-License-Identifier: Apache-2.0
"""Runs a tool on a tree made of {path: text}."""

import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def write_tree(root, texts):
    for place, text in texts.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def run_tool(tool, root, *arguments):
    """(exit status, what was printed)"""
    done = subprocess.run(
        [sys.executable, TOOLS / f"{tool}.py", "--root", root, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout
