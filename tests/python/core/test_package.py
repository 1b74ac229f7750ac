# SPDX-License-Identifier: Apache-2.0
"""What is installed: the stub names what the module has, the program runs, errors are typed."""

import ast
import subprocess
import sys
from importlib import resources

import pytest

import weft
from weft import _core


def test_the_stub_lists_every_class_and_member():
    tree = ast.parse(resources.files("weft").joinpath("_core.pyi").read_text())
    stubs = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    classes = {n: c for n, c in vars(_core).items() if isinstance(c, type)}
    assert stubs.keys() == classes.keys()
    for name, node in stubs.items():
        listed = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        members = {m for m in vars(classes[name]) if not m.startswith("_")}
        assert members == {m for m in listed if not m.startswith("_")}, name


def test_public_names_are_documented():
    for name in weft.__all__:
        assert getattr(weft, name).__doc__, name


def test_the_program_runs():
    if not resources.files("weft").joinpath("bin", "weft").is_file():
        pytest.skip("the package was not installed from a wheel")
    done = subprocess.run(
        [sys.executable, "-m", "weft", "info"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "weft" in done.stdout, done.stderr


def test_errors_are_also_the_built_in_ones():
    assert issubclass(weft.InvalidArgument, ValueError)
    assert issubclass(weft.TimeoutError, TimeoutError)
    for error in (weft.InvalidArgument, weft.TimeoutError, weft.PeerError, weft.NotAvailable):
        assert issubclass(error, weft.Error)
