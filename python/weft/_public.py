# SPDX-License-Identifier: Apache-2.0
"""The names of `weft`, which its __init__ takes from here when the first of them is used."""

# torch's libraries go before ours: where ours came first, torch 2.11 crashed while it was imported.
import torch as _torch  # noqa: F401

from weft._version import __version__
from weft.autograd import combine, dispatch, plan, plan_and_dispatch
from weft.balance import Balance
from weft.errors import (
    Error,
    InvalidArgument,
    NotAvailable,
    PeerError,
    RanksLost,
    TimeoutError,
    Unsupported,
)
from weft.exchange import Exchange
from weft.exchange_state import CallReport
from weft.group import Group
from weft.outputs import Combined, Dispatched, Plan
from weft.placement import Balancing, Placement, balanced_rows, replica_rows
from weft.tally import prometheus, stats

__all__ = [
    "Balance",
    "Balancing",
    "CallReport",
    "Combined",
    "Dispatched",
    "Error",
    "Exchange",
    "Group",
    "InvalidArgument",
    "NotAvailable",
    "PeerError",
    "Placement",
    "Plan",
    "RanksLost",
    "TimeoutError",
    "Unsupported",
    "__version__",
    "balanced_rows",
    "combine",
    "dispatch",
    "plan",
    "plan_and_dispatch",
    "prometheus",
    "replica_rows",
    "stats",
]
