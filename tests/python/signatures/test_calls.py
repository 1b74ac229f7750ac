# SPDX-License-Identifier: Apache-2.0
"""The calls that other programs make, read from their sources and bound to Weft's signatures, as
docs/signatures.md lists them."""

import ast
import importlib
import inspect
import textwrap
import types

import calls
import pytest
from sources import allowed, differences_of, is_of, rows, source

PLACES = [[cell.replace("`", "") for cell in row] for row in rows("caller")]
ALLOWED = allowed("called in")


def names(cell: str) -> set[str]:
    return set(cell.split(", "))


def found_at(path: str) -> type | types.ModuleType:
    """A class, or a module of functions."""
    module, _, name = path.rpartition(".")
    if name[0].isupper():
        return getattr(importlib.import_module(module), name)
    return importlib.import_module(path)


@pytest.mark.parametrize("package, file, within, called, path, number", PLACES)
def test_calls_bind_to_weft(package, file, within, called, path, number):
    owner = found_at(path)
    inside = None if within == "all" else names(within)
    given = (set(), inside, names(called)) if inspect.ismodule(owner) else (names(called), inside)
    made = list(calls.calls(source(package, file), *given))
    assert len(made) == int(number)
    prefix = path.rpartition(".")[2] + "."
    found: dict[str, set[str]] = {}
    for call in made:
        for what in calls.problems(call, owner):
            found.setdefault(prefix + call.name, set()).add(what)
    wanted = {
        name: what
        for name, what in differences_of(ALLOWED, package, file).items()
        if name.startswith(prefix)
    }
    assert found == wanted


def test_every_difference_belongs_to_a_call():
    for ending, name, _ in ALLOWED:
        owners = {row[4].rpartition(".")[2] for row in PLACES if is_of(ending, *row[:2])}
        assert name.partition(".")[0] in owners, (ending, name)


# The comparison finds what it is for.


class Taker:
    def __init__(self, group, size=0, *, more=False):
        pass

    def send(self, x, y=None, *, late=False):
        pass

    @staticmethod
    def hint(size):
        pass

    @classmethod
    def set_num(cls, number):
        pass


CALLER = """
class One:
    def run(self, flag):
        self.taker.send(1, y=2, late=flag)
        taker.send(1, 2, 3)
        other.send(nothing=True)
        options = dict(late=True)
        if flag:
            options["later"] = 1
        taker.send(1, **options)
        taker.send(1, **(dict(y=2) if flag else {"z": 3}))
        taker.send(x=1, **self.more(flag))
        taker.gone()
    def more(self, flag):
        if flag:
            return {}
        known = {"late": 1, "never": 2}
        return {name: value for name, value in known.items() if value}
class Two:
    def run(self):
        made = {"group": 1, "more": True}
        taker = self.cache.get_or_create(made, lib.Taker)
        Taker(1, 2, 3)
        Taker.hint(1, 2)
        lib.Taker.set_num(8)
"""


def test_calls_and_their_problems_are_found():
    found = [
        (call.name, list(calls.problems(call, Taker)))
        for call in calls.calls(CALLER, {"taker", "Taker"})
    ]
    assert found == [
        ("send", []),
        ("send", ["too many positional arguments"]),
        ("send", ["`later`: absent"]),
        ("send", ["`z`: absent"]),
        ("send", ["`never`: absent"]),
        ("gone", ["absent"]),
        ("__init__", []),
        ("__init__", ["too many positional arguments"]),
        ("hint", ["too many positional arguments"]),
        ("set_num", []),
    ]
    inside = [call.name for call in calls.calls(CALLER, {"taker", "Taker"}, {"Two"})]
    assert inside == ["__init__", "__init__", "hint", "set_num"]


def test_calls_of_functions_are_found():
    text = "def run(x):\n    send(x, y=2)\n    send(1, 2, z=3)\n    other.send()\n    gone()"
    owner = types.ModuleType("owner")
    owner.send = lambda x, y=1: None
    made = calls.calls(text, set(), None, {"send", "gone"})
    found = [(call.name, list(calls.problems(call, owner))) for call in made]
    assert found == [("send", []), ("send", ["`z`: absent"]), ("gone", ["absent"])]


@pytest.mark.parametrize("given", ["*rest", "**rest", "**self.rest()", "**rest[0]"])
def test_what_cannot_be_read_is_an_error(given):
    text = f"""
        class One:
            def run(self, rest):
                taker.send({given})
    """
    ast.parse(textwrap.dedent(text))
    with pytest.raises(ValueError, match="line 4"):
        list(calls.calls(textwrap.dedent(text), {"taker"}))
