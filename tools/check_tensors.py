#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that the package makes every tensor with its device, and floats with their dtype: a program
may have set other defaults."""

import ast
import sys

import tree

# Functions of torch that make tensors on the default device.
FACTORIES = set(
    "arange as_tensor empty empty_permuted empty_strided eye full linspace logspace ones rand randint "
    "randn randperm scalar_tensor tensor tril_indices triu_indices zeros".split()
)
# Those whose numbers are floats of the default dtype where no other is said.
OF_FLOATS = set("empty empty_permuted empty_strided eye linspace logspace ones rand randn zeros".split())


def is_of(call, module, names):
    """Returns whether it is a call of one of the module's names."""
    function = call.func if isinstance(call, ast.Call) else None
    is_member = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    return is_member and function.value.id == module and function.attr in names


def problems(text):
    """Line and problem of each call without them. Parameters of modules follow the program's defaults."""
    nodes = list(ast.walk(ast.parse(text)))
    parameters = [node for node in nodes if is_of(node, "nn", {"Parameter"})]
    free = {inner for node in parameters for inner in ast.walk(node)}
    for node in nodes:
        if node in free or not is_of(node, "torch", FACTORIES):
            continue
        name = node.func.attr
        given = {keyword.arg for keyword in node.keywords}
        wanted = ["device", "dtype"] if name in OF_FLOATS else ["device"]
        missing = [word for word in wanted if word not in given]
        if missing and None not in given:  # None: **options
            yield node.lineno, f"torch.{name} without {' and '.join(missing)}"


def check(root):
    findings, num_files = [], 0
    for path in tree.files(root / "python/weft", ".py"):
        place = path.relative_to(root)
        if "examples" in place.parts:  # programs, which have defaults of their own
            continue
        num_files += 1
        findings += [f"{place}:{line}: {problem}" for line, problem in problems(path.read_text())]
    return findings, num_files


def main():
    args = tree.parser(__doc__).parse_args()
    findings, num_files = check(args.root.resolve())
    return tree.report("check_tensors", findings, f"{num_files} files make tensors with their device")


if __name__ == "__main__":
    sys.exit(main())
