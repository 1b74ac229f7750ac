# SPDX-License-Identifier: Apache-2.0
"""The normal calls of a `Buffer`: the routing says how many rows there are."""

from .calls import NormalMode as NormalMode
