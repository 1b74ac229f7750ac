# SPDX-License-Identifier: Apache-2.0
"""How many ranks share an NVLink domain: ranks that load and store each other's memory."""

from __future__ import annotations

import warnings

from weft import Group
from weft.compat import environment

from .checks import check

ENVIRONMENT = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"


def found_ranks_per_domain(group: Group) -> int:
    """The size of the group's domains, if they are equal blocks of adjacent ranks; else all ranks.

    Domains of another shape do not hinder an exchange; there is just no one number for them.
    """
    domains = group.domains
    size = len(domains[0])
    blocks = [list(range(first, first + size)) for first in range(0, group.num_ranks, size)]
    return size if sorted(sorted(domain) for domain in domains) == blocks else group.num_ranks


def ranks_per_domain(group: Group) -> int:
    """`found_ranks_per_domain`, or the environment variable's number, with a warning if it differs.

    Raises InvalidArgument if the number of ranks is not a multiple of it.
    """
    found = found_ranks_per_domain(group)
    text = environment.text(ENVIRONMENT)
    if text is None:
        return found
    is_number = text.isdecimal() and int(text) > 0
    check(
        is_number and group.num_ranks % int(text) == 0,
        f"HybridEPBuffer: {ENVIRONMENT} = '{text}' (expected a divisor of the "
        f"{group.num_ranks} ranks)",
    )
    if int(text) != found:
        warnings.warn(
            f"{ENVIRONMENT} = {text} replaces the {found} ranks per domain that were found",
            stacklevel=3,
        )
    return int(text)
