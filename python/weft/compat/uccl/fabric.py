# SPDX-License-Identifier: Apache-2.0
"""Turns UCCL's choice of network into `WEFT_FABRIC_ADDRESS` and `WEFT_FABRIC`."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from weft.compat import environment

_CARDS = Path("/sys/class/infiniband")
_PROVIDERS = ("cxi", "efa", "verbs", "tcp", "shm")


def adopt_network() -> None:
    """Sets Weft's two variables, where unset, from UCCL's.

    They stay for the whole process: an exchange that grows opens the network anew. A name of
    nothing on this host is passed on: opening the network refuses it on all ranks, and a group that
    needs no network is not disturbed.
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
    """Returns the first interface that `wanted` allows, or None.

    wanted: prefixes of names between commas, whole names after '='; after '^' names to leave out,
    and the loopback interface with them.
    """
    is_exclusion, is_exact, listed = _read(wanted)
    for name in present:
        is_listed = name in listed if is_exact else name.startswith(listed)
        if is_listed != is_exclusion and not (is_exclusion and name == "lo"):
            return name
    return None


def fabric_of(transport: str | None, cards: str | None, folder: Path) -> str | None:
    """Returns the value for `WEFT_FABRIC`, None to leave the choice to Weft.

    transport: a provider that Weft knows; any other word is no choice. cards: as for
    `interface_of`, a port after ':' is cut off. Of several, cards with the first card's driver
    count, and each rank takes the nearest.
    """
    provider = transport if transport in _PROVIDERS else None
    found = _cards_of(cards, folder) if cards is not None else []
    links = [folder / card / "device" / "driver" for card in found]
    drivers = ["efa" if link.resolve().name == "efa" else "verbs" for link in links]
    driver = provider or next(iter(drivers), None)
    domains = [
        f"{card}-rdm" if driver == "efa" else card
        for card, of_card in zip(found, drivers)
        if of_card == driver
    ]
    return f"{driver}/{','.join(domains)}" if domains else provider


def _cards_of(wanted: str, folder: Path) -> list[str]:
    """Returns wanted cards in order; as written if none is present."""
    is_exclusion, is_exact, listed = _read(wanted)
    listed = tuple(one.split(":")[0] for one in listed)
    present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not is_exact:
        whole = [name for name in present if name in listed]
        listed = whole or [name for name in present if name.startswith(listed)] or listed
    if is_exclusion:
        return [name for name in present if name not in listed]
    return [name for name in present if name in listed] or list(listed)


def _read(wanted: str) -> tuple[bool, bool, tuple[str, ...]]:
    """Returns whether listed names are left out, whether names are whole, and the list."""
    rest = wanted.removeprefix("^")
    listed = tuple(one for one in rest.removeprefix("=").split(",") if one)
    return rest != wanted, rest.startswith("="), listed


def _give(name: str, value: str) -> None:
    if not os.environ.get(name):
        os.environ[name] = value
