# SPDX-License-Identifier: Apache-2.0
# Made by python -m nanobind.stubgen -m weft._core
"""The C++ API of Weft."""

from collections.abc import Callable

from numpy.typing import NDArray


class Group:
    """The ranks that exchange tokens."""

    @staticmethod
    def from_all_gather(rank: int, num_ranks: int, all_gather: Callable) -> Group:
        """Collective, over a function that swaps bytes between the ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def domains(self) -> list[list[int]]:
        """Ranks of each domain: those that can map each other's memory."""

    def all_gather(self, block: bytes) -> list:
        """Collective, for set-up: the blocks of all ranks, by rank."""

class Plan:
    """Everything derived from routing before a byte of payload moves."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def num_local_experts(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def topk(self) -> int: ...

    @property
    def layout(self) -> str: ...

    @property
    def pad_multiple(self) -> int: ...

    @property
    def from_map(self) -> bool: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def required_rows(self) -> int: ...

    @property
    def overflow(self) -> bool: ...

    @property
    def row_weight_cols(self) -> int: ...

    @property
    def rows_per_expert(self) -> list[int]: ...

    @property
    def padded_rows_per_expert(self) -> list[int]: ...

    @property
    def expert_begin(self) -> list[int]: ...

    @property
    def global_routes_per_expert(self) -> list[int]: ...

    @property
    def received_arrivals(self) -> list[int]: ...

    @property
    def sent_arrivals(self) -> list[int]: ...

    def wire_bytes(self, row_bytes: int) -> int: ...
    def crossing_bytes(self, row_bytes: int) -> int: ...

    def logical_bytes(self, row_bytes: int) -> int: ...

    def to_json(self) -> str: ...

    @staticmethod
    def from_json(text: str, name: str = 'text') -> Plan: ...

    def on_device(self, device: int) -> dict:
        """
        Tensors over the plan's own memory on GPU `device`; None each for a plan of the CPU.
        """

    def __eq__(self, arg: Plan, /) -> bool: ...

    def __repr__(self) -> str: ...

class Exchange:
    """Moves tokens to their experts and back."""

    def __init__(self, group: Group, *, hidden: int, max_tokens: int, num_experts: int, max_topk: int, device: int = -1, transport: str = 'auto', num_threads: int = 0, num_sms: int = 0, copy_engines: bool = False, timeout: float = 30.0) -> None: ...

    def plan(self, routing: tuple[NDArray | None, NDArray | None, NDArray | None], choices: tuple[str, int, int, int | None, str], how: tuple[int, int, bool]) -> Plan: ...

    def dispatch(self, plan: Plan, inputs: tuple[NDArray, NDArray | None, NDArray | None], outputs: tuple[NDArray | None, NDArray | None, NDArray | None], quantise: str, how: tuple[int, int, bool]) -> None: ...

    def plan_and_dispatch(self, routing: tuple[NDArray | None, NDArray | None, NDArray | None], choices: tuple[str, int, int, int | None, str], inputs: tuple[NDArray, NDArray | None, NDArray | None], outputs: tuple[NDArray | None, NDArray | None, NDArray | None], quantise: str, how: tuple[int, int, bool], failed: list) -> tuple[Plan, bool]: ...

    def combine(self, plan: Plan, inputs: tuple[NDArray, NDArray | None, NDArray | None], outputs: tuple[NDArray, NDArray | None], scale: str, how: tuple[int, int, bool]) -> None: ...

    def allocate(self, rows: int, cols: int, like: NDArray) -> object: ...

    def check(self) -> None: ...

    def release_pooled(self) -> None: ...

    def stats(self) -> dict: ...

    def footprint(self) -> dict: ...

    @property
    def transport(self) -> str: ...

def give_segments(exchange: Exchange | None) -> None:
    """The exchange that gives this thread's next segments; None: nobody."""
