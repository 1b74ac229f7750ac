# SPDX-License-Identifier: Apache-2.0
"""Members of `ElasticBuffer` that `deep_ep` marks experimental and no MoE layer calls."""

from __future__ import annotations

from typing import Any, NoReturn

from weft import Unsupported

_WHAT = {
    "engram": "fetching entries of a remote table is not an exchange of tokens",
    "pp": "sending between pipeline stages is torch.distributed's work",
    "agrs": "gathering and scattering are torch.distributed's work",
}
_MEMBERS = {
    "engram": ("engram_write", "engram_fetch", "get_engram_storage_size_hint"),
    "pp": ("pp_set_config", "pp_send", "pp_recv", "get_pp_buffer_size_hint"),
    "agrs": (
        "create_agrs_session",
        "destroy_agrs_session",
        "agrs_new_session",
        "agrs_set_config",
        "agrs_get_inplace_tensor",
        "all_gather",
        "get_agrs_num_max_session_bytes",
        "get_agrs_buffer_size_hint",
    ),
}


def _refusing(name: str, why: str) -> staticmethod:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise Unsupported(f"{name}: experimental and not part of Weft ({why})", "unsupported")

    refuse.__name__ = name
    refuse.__doc__ = f"Raises Unsupported: {why}."
    return staticmethod(refuse)


class Experimental:
    """Has those members; each raises Unsupported."""


for _kind, _names in _MEMBERS.items():
    for _name in _names:
        setattr(Experimental, _name, _refusing(_name, _WHAT[_kind]))
