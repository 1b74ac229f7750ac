# SPDX-License-Identifier: Apache-2.0
"""Calls that are interrupted before they have begun, of which the other ranks must hear."""

import pytest

import weft


def refused_by_interrupt(calls, owner, name, is_stopped, stopped_rank):
    """Each of `calls` where `owner.name`, which it asks before it begins, raises an interrupt on
    the rank that is_stopped; then once more without."""

    def stop(*_):
        raise KeyboardInterrupt

    usual = getattr(owner, name)
    for call in calls:
        try:
            if is_stopped:
                setattr(owner, name, stop)
            with pytest.raises(KeyboardInterrupt if is_stopped else weft.InvalidArgument) as found:
                call()
        finally:
            setattr(owner, name, usual)
        assert is_stopped or f"rank {stopped_rank}" in str(found.value)
        call()
