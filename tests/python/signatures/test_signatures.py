# SPDX-License-Identifier: Apache-2.0
"""docs/signatures.md against the sources of other libraries, which are read and not imported."""

import ast
import functools
import importlib

import compare
import pytest
from sources import allowed, differences_of, is_of, rows, source

ANOTHER = "another signature"

FILES = [[cell.strip("`") for cell in row] for row in rows("package")]
ALLOWED = allowed("file")


@pytest.mark.parametrize("package, file, module, compared", FILES)
def test_differences_are_those_of_the_page(package, file, module, compared):
    text, weft_module = source(package, file), importlib.import_module(module)
    found: dict[str, set[str]] = {}
    for name, what in compare.compare(text, weft_module, compared == "all"):
        found.setdefault(name, set()).add(what)
    wanted = differences_of(ALLOWED, package, file)
    for name, differences in wanted.items():
        if differences == {ANOTHER} and name in found:
            found[name] = {ANOTHER}
    assert found == wanted


def test_every_difference_belongs_to_a_file():
    for ending, *_ in ALLOWED:
        assert any(is_of(ending, *row[:2]) for row in FILES), ending
    assert {row[3] for row in FILES} == {"all", "shared"}


# The comparison finds what it is for.


def of(text: str) -> compare.Signature:
    (function,) = ast.parse(f"def f({text}): pass").body
    return compare.of_source(function, False)


def weft_function(text: str) -> compare.Signature:
    scope: dict = {}
    exec(f"def f({text}): pass", scope)
    return compare.of_weft(scope["f"], False)


@pytest.mark.parametrize(
    "theirs, ours, wanted",
    [
        ("a, b=1, *, c=None", "a, b=1, *, c=None", []),
        ("a, b", "a, b, c=1, *, d=2", []),  # more
        ("a, b", "a=1, b=2", []),
        ("a, *, b=1", "a, b=1", []),
        ("a, n, p", "a, m=None, p=None, *, n=None", []),  # two names of one place
        ("a, b=1", "*args, **names", []),
        ("a, b=1", "a, b=2", ["`b`: default 2, not 1"]),
        ("a, b=1", "a, b=True", ["`b`: default True, not 1"]),
        ("a, b=1", "a, b", ["`b`: has no default"]),
        ("a, *, b=1", "a, *, b=2", ["`b`: default 2, not 1"]),
        ("a, b", "a, c", ["`b`: is called `c`"]),
        ("a, b", "b, a", ["`a`: argument 2, not 1", "`b`: argument 1, not 2"]),
        ("a, b=1", "a, *, b=1", ["`b`: by name only"]),
        ("a, b=1", "a, *args, b=1", []),
        ("a, b=1", "a, *args, b=2", ["`b`: default 2, not 1"]),
        ("a, b=1", "a, *args", ["`b`: absent"]),
        ("a, b=1", "a", ["`b`: absent"]),
        ("a, *, b=1", "a", ["`b`: absent"]),
        ("a", "a, b", ["`b`: needed"]),
        ("a", "a, *, b", ["`b`: needed"]),
        ("*a", "", ["any number of arguments: no"]),
        ("**a", "", ["any names: no"]),
    ],
)
def test_a_difference_is_found(theirs, ours, wanted):
    assert list(compare.differences(of(theirs), weft_function(ours))) == wanted


def test_names_do_not_count_by_position():
    assert not list(compare.differences(of("a, b=1"), weft_function("x, y=1"), True))
    assert not list(compare.differences(of("a, b=1"), weft_function("x, *rest"), True))
    found = list(compare.differences(of("a, b=1"), weft_function("x, y=2"), True))
    assert found == ["`b`: default 2, not 1"]


def test_a_wrapper_takes_positions():
    def inner(a, *, b=1):
        pass

    @functools.wraps(inner)
    def outer(*args, **names):
        pass

    assert not list(compare.differences(of("a, b=1"), compare.of_weft(outer, False)))
    found = list(compare.differences(of("a, c=1"), compare.of_weft(outer, False)))
    assert found == ["`c`: absent"]


THEIRS = """
if HAVE:
    def present(a, b): pass
else:
    present = None
def missing(): pass
def _private(a): pass
class Kept:
    def __init__(self, a): pass
    @staticmethod
    def static(a): pass
    @classmethod
    def of_class(cls, a): pass
    @property
    def value(self): pass
    @abstractmethod
    def left_to_others(self): pass
    def gone(self): pass
    def _own(self): pass
class Gone:
    def method(self): pass
@dataclass
class Fields:
    one: int = 1
    two: int = 2
"""


class Weft:
    __all__ = ("present", "Kept")

    @staticmethod
    def present(a, c):
        pass

    class Kept:
        def __init__(self, a, b):
            pass

        def static(self):  # of an instance
            pass

        @classmethod
        def of_class(cls, b):
            pass

    class Fields:
        def __init__(self, *, two=2, one=3):
            pass


def test_the_right_names_are_compared():
    found = list(compare.compare(THEIRS, Weft, is_whole=True))
    assert found == [
        ("present", "`b`: is called `c`"),
        ("missing", "absent"),
        ("Kept.__init__", "`b`: needed"),
        ("Kept.static", "`a`: absent"),
        ("Kept.of_class", "`a`: is called `b`"),
        ("Kept.value", "absent"),
        ("Kept.gone", "absent"),
        ("Gone", "absent"),
        ("Fields", "`one`: default 3, not 1"),
    ]
    shared = list(compare.compare(THEIRS, Weft, is_whole=False))
    assert shared == [each for each in found if each[0].partition(".")[0] in Weft.__all__]
