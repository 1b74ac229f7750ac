# SPDX-License-Identifier: Apache-2.0
"""UCCL's choice of network, as Weft's own: `WEFT_FABRIC_ADDRESS` and `WEFT_FABRIC`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from weft.compat import environment

_CARDS = Path("/sys/class/infiniband")
_PROVIDERS = ("cxi", "efa", "verbs", "tcp", "shm")


def adopt_network() -> None:
    """Sets Weft's two variables, where they are not set, by UCCL's.

    For the whole process, and to stay: an exchange that grows opens the network anew. What names
    nothing on this host is passed on as it is: whoever opens the network refuses it on all ranks,
    and a group that needs none is not disturbed.
    """
    interface = environment.text("UCCL_SOCKET_IFNAME")
    if interface is not None:
        found = interface_of(interface, (name for _, name in socket.if_nameindex()))
        _give("WEFT_FABRIC_ADDRESS", found or interface)
    cards = environment.text("UCCL_IB_HCA", "NCCL_IB_HCA")
    fabric = fabric_of(environment.text("UCCL_EP_TRANSPORT"), cards, _CARDS)
    if fabric is not None:
        _give("WEFT_FABRIC", fabric)


def interface_of(wanted: str, present: Iterable[str]) -> str | None:
    """The first interface that `wanted` lets through, None if there is none.

    wanted: beginnings of names between commas, whole names after '='; after '^' those to leave
    out, and the loopback interface with them.
    """
    is_exclusion = wanted.startswith("^")
    rest = wanted.removeprefix("^")
    is_exact = rest.startswith("=")
    listed = [one for one in rest.removeprefix("=").split(",") if one]
    for name in present:
        is_listed = any(name == one if is_exact else name.startswith(one) for one in listed)
        if is_listed != is_exclusion and not (is_exclusion and name == "lo"):
            return name
    return None


def fabric_of(transport: str | None, cards: str | None, folder: Path) -> str | None:
    """What `WEFT_FABRIC` is to be, None to leave the choice to Weft.

    transport: a provider that Weft knows; any other word is no choice. cards: as for
    `interface_of`, a port after ':' is cut off; it counts if it comes down to one of those in
    `folder`.
    """
    provider = transport if transport in _PROVIDERS else None
    card = _card_of(cards, folder) if cards is not None else None
    if card is None:
        return provider
    is_efa = (folder / card / "device" / "driver").resolve().name == "efa"
    driver, domain = ("efa", f"{card}-rdm") if is_efa else ("verbs", card)
    return f"{driver}/{domain}" if provider in (None, driver) else provider


def _card_of(wanted: str, folder: Path) -> str | None:
    if wanted.startswith("^"):
        return None
    listed = [one.split(":")[0] for one in wanted.removeprefix("=").split(",") if one]
    present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    found = {name for name in present if name in listed}
    if not found and not wanted.startswith("="):
        found = {name for name in present if any(name.startswith(one) for one in listed)}
    if not found:
        found = set(listed)
    return found.pop() if len(found) == 1 else None


def _give(name: str, value: str) -> None:
    if not os.environ.get(name):
        os.environ[name] = value
