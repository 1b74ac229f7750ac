# SPDX-License-Identifier: Apache-2.0
"""What callers know as assertions, kept under `python -O`."""


def expect(condition: bool, text: str) -> None:
    """Raises AssertionError(text) unless `condition`."""
    if not condition:
        raise AssertionError(text)
