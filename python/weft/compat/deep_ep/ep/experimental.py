# SPDX-License-Identifier: Apache-2.0
"""Classes that `deep_ep` marks experimental. They have their names, and refuse to be made: none of
them exchanges tokens."""

from typing import Any, NoReturn

from ..checks import NotInWeft


class _Absent:
    purpose: str

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Raises Unsupported, whatever it is called with."""
        self._refuse()

    @classmethod
    def _refuse(cls) -> NoReturn:
        raise NotInWeft(
            f"{cls.__name__}: experimental and not part of Weft ({cls.purpose} is not an exchange "
            "of tokens)"
        )


class EngramBuffer(_Absent):
    """Entries of a remote table."""

    purpose = "fetching entries of a remote table"


class PPBuffer(_Absent):
    """Sends between pipeline stages."""

    purpose = "sending between pipeline stages"


class BucketBuffer(_Absent):
    """Gathers and scatters of parameters."""

    purpose = "gathering and scattering"


class BucketSession(_Absent):
    """One of a `BucketBuffer`."""

    purpose = "gathering and scattering"
