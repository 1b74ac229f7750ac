# SPDX-License-Identifier: Apache-2.0
"""Signatures of another library, read from its source without importing it, beside Weft's.

Weft may take more than the other; what the other takes, Weft has to take as well: by the same
names, in the same places, with the same defaults.
"""

import ast
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

Definition = ast.FunctionDef | ast.ClassDef


class Parameter(NamedTuple):
    name: str
    default: Any  # None: there is none; else the other's expression, or Weft's value in a tuple


class Signature(NamedTuple):
    positional: list[Parameter]
    keyword: list[Parameter]
    takes_positions: bool  # *args
    takes_names: bool  # **kwargs

    def names(self) -> set[str]:
        return {each.name for each in (*self.positional, *self.keyword)}


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Functions, classes and methods by their dotted names, wherever conditions define them; of
    several definitions the first."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from definitions([*node.body, *node.orelse], prefix)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, f"{prefix}{node.name}.")


def decorators(node: Definition) -> set[str]:
    return {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in node.decorator_list}


def of_source(node: ast.FunctionDef, is_method: bool) -> Signature:
    """Without self and cls."""
    given = node.args
    positional = given.posonlyargs + given.args
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    pairs = [Parameter(each.arg, value) for each, value in zip(positional, defaults)]
    is_bound = is_method and "staticmethod" not in decorators(node)
    keyword = [
        Parameter(each.arg, value) for each, value in zip(given.kwonlyargs, given.kw_defaults)
    ]
    return Signature(pairs[is_bound:], keyword, given.vararg is not None, given.kwarg is not None)


def of_fields(node: ast.ClassDef) -> Signature:
    """A dataclass: its fields are given by name."""
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return Signature([], [Parameter(each.target.id, each.value) for each in fields], False, False)


def of_weft(found: Any, is_method: bool) -> Signature:
    """found: as it is in its class, where it is a method."""
    is_bound = is_method and not isinstance(found, staticmethod)
    kinds = {kind: [] for kind in inspect._ParameterKind}
    function = getattr(found, "__func__", found)
    parameters = list(inspect.signature(function).parameters.values())[is_bound:]
    for each in parameters:
        default = None if each.default is each.empty else (each.default,)
        kinds[each.kind].append(Parameter(each.name, default))
    # A wrapper may take by position what it hands on by name.
    outer = inspect.signature(function, follow_wrapped=False).parameters.values()
    takes_positions = any(each.kind is each.VAR_POSITIONAL for each in outer)
    return Signature(
        kinds[inspect.Parameter.POSITIONAL_ONLY] + kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD],
        kinds[inspect.Parameter.KEYWORD_ONLY],
        takes_positions or bool(kinds[inspect.Parameter.VAR_POSITIONAL]),
        bool(kinds[inspect.Parameter.VAR_KEYWORD]),
    )


def _default(theirs: Parameter, ours: Parameter) -> Iterator[str]:
    if theirs.default is None:
        return
    if ours.default is None:
        yield f"`{theirs.name}`: has no default"
        return
    (value,) = ours.default
    try:
        wanted = ast.literal_eval(theirs.default)
        is_same = wanted == value and type(wanted) is type(value)
    except ValueError:
        is_same = ast.unparse(theirs.default) == str(value)
    if not is_same:
        yield f"`{theirs.name}`: default {value}, not {ast.unparse(theirs.default)}"


def differences(theirs: Signature, ours: Signature, by_position: bool = False) -> Iterator[str]:
    """Yields what a call of theirs could stumble over. by_position: no caller uses names."""
    places = {each.name: place for place, each in enumerate(ours.positional)}
    by_name = {each.name: each for each in ours.keyword}
    for place, each in enumerate(theirs.positional):
        here = ours.positional[place] if place < len(ours.positional) else None
        if here is not None and (by_position or here.name == each.name):
            yield from _default(each, here)
        elif each.name in places and not by_position:
            yield f"`{each.name}`: argument {places[each.name] + 1}, not {place + 1}"
        elif each.name in by_name and here is not None and here.name not in theirs.names():
            yield from _default(each, here)  # by place under one name, by name under the other
        elif each.name in by_name:
            if not ours.takes_positions:
                yield f"`{each.name}`: by name only"
            yield from _default(each, by_name[each.name])
        elif ours.takes_positions and (by_position or ours.takes_names):
            continue
        elif here is not None and here.name not in theirs.names():
            yield f"`{each.name}`: is called `{here.name}`"
        else:
            yield f"`{each.name}`: absent"
    for each in theirs.keyword:
        if each.name in by_name or each.name in places:
            here = by_name.get(each.name) or ours.positional[places[each.name]]
            yield from _default(each, here)
        elif not ours.takes_names:
            yield f"`{each.name}`: absent"
    if theirs.takes_positions and not ours.takes_positions:
        yield "any number of arguments: no"
    if theirs.takes_names and not ours.takes_names:
        yield "any names: no"
    renamed = {each.name for each in ours.positional[: len(theirs.positional)]}
    for each in (*ours.positional, *ours.keyword):
        if each.default is None and each.name not in theirs.names() | renamed:
            yield f"`{each.name}`: needed"


def _find(module: Any, name: str) -> Any:
    """Object of the dotted name, a static or class method as such; AttributeError without it."""
    found = module
    for part in name.split("."):
        static = inspect.getattr_static(found, part, None) if inspect.isclass(found) else None
        found = static if isinstance(static, staticmethod | classmethod) else getattr(found, part)
    return found


def compare(text: str, module: Any, is_whole: bool) -> Iterator[tuple[str, str]]:
    """(name, difference) of each public function, and of those private ones that are in `__all__`.

    is_whole: whether `module` stands for all of the source `text`; else for what both have.
    """
    known = getattr(module, "__all__", ())
    seen: set[str] = set()
    for name, node in definitions(ast.parse(text).body):
        first, *rest = name.split(".")
        is_public = not first.startswith("_") or first in known
        if not is_public or name in seen or (not is_whole and first not in known):
            continue
        seen.add(name)
        if any(part.startswith("_") and part != "__init__" for part in rest):
            continue
        owner = ".".join((first, *rest)[:-1])
        if owner and (owner not in seen or (owner, "absent") in seen):
            continue
        if "abstractmethod" in decorators(node):
            continue
        try:
            found = _find(module, name)
        except AttributeError:
            seen.add((name, "absent"))
            yield name, "absent"
            continue
        if isinstance(node, ast.ClassDef):
            if "dataclass" in decorators(node):
                for what in differences(of_fields(node), of_weft(found, False)):
                    yield name, what
            continue
        if "property" in decorators(node):
            continue
        theirs, ours = of_source(node, bool(rest)), of_weft(found, bool(rest))
        by_position = rest[-1:] in (["forward"], ["backward"])  # of autograd and of modules
        for what in differences(theirs, ours, by_position):
            yield name, what
