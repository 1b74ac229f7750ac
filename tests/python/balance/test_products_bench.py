# SPDX-License-Identifier: Apache-2.0
"""The program that asks which products keep a row's bits finds what was put into made-up ones."""

import importlib.util
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[3] / "bench/products_bench.py"


@pytest.fixture
def bench():
    spec = importlib.util.spec_from_file_location("products_bench", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_row(rows, weights):
    return [(one[:, :, None] * weight).sum(1) for one, weight in zip(rows, weights)]


def small_otherwise(rows, weights):
    return [one + (len(one) < 8) for one in by_row(rows, weights)]


def by_number(rows, weights):
    return [one + len(one) for one in by_row(rows, weights)]


def by_place(rows, weights):
    return [one + torch.arange(len(one))[:, None] % 16 for one in by_row(rows, weights)]


def by_others(rows, weights):
    return [one + len(rows[0]) for one in by_row(rows, weights)]


@pytest.mark.parametrize(
    ("product", "found"),
    [
        (by_row, (1, True, True)),
        (small_otherwise, (8, True, True)),
        (by_number, (None, None, True)),
        (by_place, (1, False, True)),
        (by_others, (1, True, False)),
    ],
)
def test_what_a_row_depends_on_is_found(bench, monkeypatch, product, found):
    monkeypatch.setitem(bench.PRODUCTS, "grouped", product)
    row = bench.find("grouped", torch.float32, 4, 3, torch.device("cpu"))
    assert (row["rows_from"], row["moves"], row["beside"]) == found


def test_the_two_products_are_products(bench):
    rows = [torch.ones(2, 8), torch.ones(0, 8), torch.ones(3, 8)]
    for product in bench.PRODUCTS.values():
        made = product(rows, torch.ones(3, 8, 8).mul(torch.tensor([1.0, 2, 3])[:, None, None]))
        assert [one.unique().tolist() for one in made] == [[8.0], [], [24.0]]
