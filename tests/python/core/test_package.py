# SPDX-License-Identifier: Apache-2.0
"""What is installed: the stub names what the module has, the program runs, errors are typed."""

import ast
import shutil
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import pytest

import weft.config
import weft.dispatcher
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


@pytest.mark.parametrize("module", [weft, weft.config, weft.dispatcher])
def test_public_names_are_documented(module):
    for name in module.__all__:
        assert getattr(module, name).__doc__, name


def test_the_program_is_of_the_version_of_the_package():
    if not resources.files("weft").joinpath("bin", "weft").is_file():
        pytest.skip("the package was not installed from a wheel")
    assert metadata.version("weft") == weft.__version__
    done = subprocess.run(
        [sys.executable, "-m", "weft", "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"weft {weft.__version__}\n", done.stderr


def test_a_wheel_holds_the_package_the_module_and_the_program():
    files = {str(file) for file in metadata.files("weft") if not file.suffix == ".pyc"}
    installed = {f for f in files if f.startswith("weft/")}
    if "weft/bin/weft" not in installed:
        pytest.skip("the package was not installed from a wheel")
    package = Path(__file__).parents[3] / "python" / "weft"
    sources = {f"weft/{f.relative_to(package)}" for f in package.rglob("*") if f.is_file()}
    sources = {file for file in sources if "__pycache__" not in file}
    module = Path(_core.__file__).name
    assert installed == sources | {f"weft/{module}", "weft/_build_version.py", "weft/bin/weft"}
    others = {f for f in files - installed if not f.startswith("weft-")}
    assert {Path(file).name for file in others} <= {"weft"}  # the command


def test_a_compiled_module_of_another_version_is_refused(tmp_path):
    package = tmp_path / "weft"
    shutil.copytree(Path(weft.__file__).parent, package, ignore=shutil.ignore_patterns("bin"))
    (package / "_build_version.py").write_text('VERSION = "99.1.2"\n')
    done = subprocess.run(
        [sys.executable, "-c", "import weft"], cwd=tmp_path, capture_output=True, text=True
    )
    said = done.stderr.splitlines()[-1]
    assert "ImportError: weft: the package is 99.1.2, but its compiled module" in said
    assert f"{package}/_core" in said and f" is {weft.__version__}. " in said


def test_errors_are_also_the_built_in_ones():
    assert issubclass(weft.InvalidArgument, ValueError)
    assert issubclass(weft.TimeoutError, TimeoutError)
    for error in (weft.InvalidArgument, weft.TimeoutError, weft.PeerError, weft.NotAvailable):
        assert issubclass(error, weft.Error)
