# SPDX-License-Identifier: Apache-2.0
"""Calls of a class, or of functions, in another program's source, which is read and not imported,
and what keeps them from reaching the same names elsewhere."""

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

NEW = "__init__"

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Call(NamedTuple):
    line: int
    name: str  # of the method or function; `NEW` for the class itself
    num_positional: int
    ways: list[frozenset[str]]  # the names that it may be given, one set for each way through `**`


class Place(NamedTuple):
    """Function and class around an expression, to look up what its names hold."""

    function: Function | None
    owner: ast.ClassDef | None


def calls(
    text: str,
    receivers: set[str],
    within: set[str] | None = None,
    functions: set[str] = frozenset(),
) -> Iterator[Call]:
    """Yields the calls of `receivers`: names of variables, attributes and classes; and those of
    `functions`. within: only in these classes of the source. A name with a capital is a class,
    whose call makes an object."""
    for node, place in _walk(ast.parse(text), Place(None, None)):
        if within is not None and (place.owner is None or place.owner.name not in within):
            continue
        if not isinstance(node, ast.Call):
            continue
        name, given, positional = _target(node, receivers), node.keywords, node.args
        made = [one for one in node.args if _last(one) in _classes(receivers)]
        if name is None and _last(node.func) == "get_or_create" and made:
            # A cache that makes an object of the class by the names in its first argument.
            name, given, positional = NEW, [ast.keyword(None, node.args[0])], []
        if name is None and isinstance(node.func, ast.Name) and node.func.id in functions:
            name = node.func.id
        if name is None:
            continue
        if any(isinstance(one, ast.Starred) for one in positional):
            raise ValueError(f"line {node.lineno}: * in a call of {name}")
        yield Call(node.lineno, name, len(positional), _ways_of(given, place))


def _walk(node: ast.AST, place: Place) -> Iterator[tuple[ast.AST, Place]]:
    for child in ast.iter_child_nodes(node):
        inner = place
        if isinstance(child, ast.ClassDef):
            inner = Place(None, child)
        elif isinstance(child, Function):
            inner = Place(child, place.owner)
        yield child, place
        yield from _walk(child, inner)


def _last(node: ast.AST) -> str | None:
    """`c` of a.b.c, of c, and nothing of other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _classes(receivers: set[str]) -> set[str]:
    return {name for name in receivers if name[0].isupper()}


def _target(node: ast.Call, receivers: set[str]) -> str | None:
    if _last(node.func) in _classes(receivers):
        return NEW
    if isinstance(node.func, ast.Attribute) and _last(node.func.value) in receivers:
        return node.func.attr
    return None


def _ways_of(keywords: list[ast.keyword], place: Place) -> list[frozenset[str]]:
    ways = [frozenset(one.arg for one in keywords if one.arg is not None)]
    for one in keywords:
        if one.arg is None:
            ways = [way | more for way in ways for more in _names_of(one.value, place)]
    return list(dict.fromkeys(ways))


def _names_of(node: ast.AST, place: Place) -> list[frozenset[str]]:
    """The keys that a dictionary may have, one set for each way; ValueError where it cannot be
    read from the source."""
    if isinstance(node, ast.Call) and _last(node.func) == "dict" and not node.args:
        return _ways_of(node.keywords, place)
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return [frozenset(key.value for key in node.keys)]
    if isinstance(node, ast.IfExp):
        return _names_of(node.body, place) + _names_of(node.orelse, place)
    if isinstance(node, ast.DictComp):  # of the items of another, some of which it leaves out
        return _names_of(node.generators[0].iter.func.value, place)
    if isinstance(node, ast.Name) and place.function is not None:
        return _names_of_variable(node, place)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and place.owner:
        methods = [
            one
            for one in place.owner.body
            if isinstance(one, Function) and one.name == node.func.attr
        ]
        inner = [Place(one, place.owner) for one in methods]
        returned = [
            (one.value, there)
            for there in inner
            for one in ast.walk(there.function)
            if isinstance(one, ast.Return) and one.value is not None
        ]
        if returned:
            return [way for value, there in returned for way in _names_of(value, there)]
    raise ValueError(f"line {node.lineno}: ** of {ast.unparse(node)}")


def _names_of_variable(variable: ast.Name, place: Place) -> list[frozenset[str]]:
    name, assigned, added = variable.id, [], []
    for node in ast.walk(place.function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    assigned += _names_of(node.value, place)
                elif isinstance(target, ast.Subscript) and _last(target.value) == name:
                    added.append(ast.literal_eval(target.slice))
    if not assigned:
        raise ValueError(f"line {variable.lineno}: ** of {name}, which nothing is assigned")
    for key in added:
        assigned += [way | {key} for way in assigned]
    return assigned


def problems(call: Call, owner: type | ModuleType) -> Iterator[str]:
    """Yields what keeps any way of the call from binding to the method or function of `owner`."""
    found = owner if call.name == NEW else getattr(owner, call.name, None)
    if found is None:
        yield "absent"
        return
    signature = inspect.signature(found)
    is_bound = (
        inspect.ismodule(owner)
        or inspect.isclass(found)
        or inspect.ismethod(found)
        or _is_static(owner, call.name)
    )
    seen: dict[str, None] = {}
    for way in call.ways:
        for what in _problems_of(signature, call.num_positional + (not is_bound), set(way)):
            seen[what] = None
    yield from seen


def _is_static(cls: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name, None), staticmethod)


def _problems_of(signature: inspect.Signature, num_positional: int, names: set[str]):
    parameters = signature.parameters.values()
    kinds = {one.kind for one in parameters}
    taken = {
        one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for name in sorted(names - taken):
            yield f"`{name}`: absent"
        names &= taken
    placeholder: Any = None
    try:
        signature.bind(*[placeholder] * num_positional, **dict.fromkeys(names))
    except TypeError as error:
        yield str(error)
