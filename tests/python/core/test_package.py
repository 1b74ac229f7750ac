# SPDX-License-Identifier: Apache-2.0
"""The installed package: the stub names what the module has, the program runs, errors are typed."""

import ast
import re
import shutil
import signal
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import pytest

import weft.config
import weft.dispatcher
from weft import _build_version, _core


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


def program(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "weft", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def has_program():
    if not hasattr(_core, "run_program"):
        pytest.skip("the module was built without the program")


def test_the_program_is_of_the_version_of_the_package(has_program):
    done = program("--version")
    assert done.stdout == f"weft {weft.__version__}\n", done.stderr


@pytest.mark.parametrize("words", ["--version", "run --help", "stats --help"])
def test_the_program_starts_without_torch(has_program, words):
    command = [sys.executable, "-X", "importtime", "-m", "weft", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    imported = set(re.findall(r"[\w.]+$", done.stderr, re.M))
    assert done.returncode == 0 and "weft" in imported
    assert not {"torch", "numpy", "weft._core"} & imported


def test_names_and_submodules_are_there_when_they_are_used():
    """The compiled module comes after torch's libraries, whoever asks for it first."""
    program = """
import sys, weft
assert "torch" not in sys.modules
from weft import _core
names = list(sys.modules)
assert names.index("torch") < names.index("weft._core")
assert set(weft.__all__) <= set(dir(weft))
from weft import *
assert Exchange is weft.Exchange is weft.exchange.Exchange and weft.compat.install
assert not hasattr(weft, "exchanges") and not hasattr(weft, "torch")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for file in Path(weft.__file__).parent.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) weft\._core", file.read_text(), re.M), file


def test_the_program_passes_words_and_exit_codes_on(has_program):
    done = program("plan", "--ranks", "4", "--tokens", "5")
    assert done.returncode == 0 and "4 ranks" in done.stdout, done.stderr
    done = program("nonsense")
    assert done.returncode == 2 and '"nonsense" is not one of' in done.stderr


def test_the_programs_ranks_are_processes_of_their_own(has_program):
    done = program("check", "--quick", "--ranks", "2", "--transport", "shm")
    assert done.returncode == 0 and "equal the reference" in done.stdout, done.stderr


def test_a_reader_that_goes_away_ends_the_program_as_it_ends_others(has_program):
    words = f"{sys.executable} -m weft info --json"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"exec 3> >(exec 0<&-); sleep 0.5; {words} >&3"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 128 + signal.SIGPIPE, done.stderr


def is_from_a_wheel() -> bool:
    try:
        package = metadata.distribution("weft")
    except metadata.PackageNotFoundError:
        return False
    return Path(package.locate_file("weft/__init__.py")) == Path(weft.__file__)


def test_a_wheel_holds_the_package_and_the_module():
    if not is_from_a_wheel():
        pytest.skip("the package was not installed from a wheel")
    assert metadata.version("weft") == weft.__version__
    files = {str(file) for file in metadata.files("weft") if not file.suffix == ".pyc"}
    installed = {f for f in files if f.startswith("weft/")}
    package = Path(__file__).parents[3] / "python" / "weft"
    sources = {f"weft/{f.relative_to(package)}" for f in package.rglob("*") if f.is_file()}
    sources = {file for file in sources if "__pycache__" not in file}
    module = Path(_core.__file__).name
    assert installed == sources | {f"weft/{module}", "weft/_build_version.py"}
    others = {f for f in files - installed if not f.startswith("weft-")}
    assert {Path(file).name for file in others} <= {"weft"}  # the command


def test_the_module_asks_for_nothing_that_another_machine_may_lack():
    if not _build_version.PORTABLE:
        pytest.skip("the module was built for this machine alone")
    tool = Path(__file__).parents[3] / "tools" / "check_wheel.py"
    done = subprocess.run([sys.executable, tool, _core.__file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_compiled_module_of_another_version_is_refused(tmp_path):
    package = tmp_path / "weft"
    shutil.copytree(Path(weft.__file__).parent, package)
    (package / "_build_version.py").write_text('VERSION = "99.1.2"\n')
    done = subprocess.run(
        [sys.executable, "-c", "import weft; weft.Exchange"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    said = done.stderr.splitlines()[-1]
    assert "ImportError: weft: the package is 99.1.2, but its compiled module" in said
    assert f"{package}/_core" in said and f" is {weft.__version__}. " in said


def test_errors_are_also_the_built_in_ones():
    assert issubclass(weft.InvalidArgument, ValueError)
    assert issubclass(weft.TimeoutError, TimeoutError)
    for error in (weft.InvalidArgument, weft.TimeoutError, weft.PeerError, weft.NotAvailable):
        assert issubclass(error, weft.Error)
