# SPDX-License-Identifier: Apache-2.0
"""A hook that makes a module of grouped experts compute with replicas: between
`dispatch_postprocess` and `combine_preprocess` the module's weights are those of all places of its
rank. on_exchange.py sends rows there."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from weft.errors import InvalidArgument

from .on_exchange import _ExchangeManager

_COUNT = "num_local_experts"  # that modules reshape their weights by


class ReplicatedExperts:
    """Experts of a layer. Optimizers, checkpoints and data parallelism see only the rank's own."""

    def __init__(
        self,
        experts: nn.Module,
        num_local: int,
        weights: Sequence[str] | Mapping[str, Sequence[int]] | None,
        wgrad: str,
        queue: Callable[[], Any] | None,
    ) -> None:
        """See `MoEFlexTokenDispatcher.replicate_experts`."""
        names = [name for name, _ in experts.named_parameters()] if weights is None else weights
        shapes = weights if isinstance(weights, Mapping) else {}
        self._experts, self._num_local = experts, num_local
        self._wgrad, self._queue = wgrad, queue
        self._parts: dict[str, tuple[nn.Module, str, list[int]]] = {}
        for name in names:
            owner, _, last = name.rpartition(".")
            module = experts.get_submodule(owner)
            own = _local(getattr(module, last)).shape
            shape = [num_local, *shapes.get(name, own[1:])]
            if own.numel() != math.prod(shape) or not own:
                raise InvalidArgument(
                    f"{name} has the shape {list(own)} (expected {shape}: local experts first)"
                )
            if queue is not None and list(own) != shape:
                raise InvalidArgument(f"{name} has the shape {list(own)} (with a queue: {shape})")
            self._parts[name] = (module, last, shape)
        self._loan: tuple[Any, Any] | None = None

    def lend(self, manager: _ExchangeManager, rows: Tensor) -> Tensor:
        """Collective. Gives the module the weights of all places."""
        self._end()
        given = [getattr(module, name) for module, name, _ in self._parts.values()]
        masters = [
            _shaped(_local(one), shape) for one, (_, _, shape) in zip(given, self._parts.values())
        ]
        balance = manager.balance(tuple((tuple(one.shape[1:]), one.dtype) for one in masters))
        queue = None if self._queue is None else self._queue()
        rows, lent, loan = balance.lend(
            manager.plan, rows, *masters, wgrad=self._wgrad, queue=queue
        )
        for one, (module, name, _), place in zip(given, self._parts.values(), lent):
            # Before a module is asked for its parameters its own attributes are.
            vars(module)[name] = _like(one, place)
        if _COUNT in vars(self._experts):
            setattr(self._experts, _COUNT, balance.num_places)
        self._loan = (balance, loan)
        return rows

    def take_back(self, rows: Tensor) -> Tensor:
        """Returns what the experts made; the module has its own weights again."""
        if self._loan is None:
            raise InvalidArgument("combine: no weights are lent (dispatch_postprocess lends them)")
        balance, loan = self._loan
        self._end()
        return balance.take_back(loan, rows)[0]

    def _end(self) -> None:
        self._loan = None
        for module, name, _ in self._parts.values():
            vars(module).pop(name, None)
        if _COUNT in vars(self._experts):
            setattr(self._experts, _COUNT, self._num_local)


def _is_distributed(weight: Any) -> bool:
    """Returns whether the weight is NeMo Automodel's, whose experts ask for its local part."""
    from torch.distributed.tensor import DTensor  # takes time, and few need it

    return isinstance(weight, DTensor)


def _local(weight: Any) -> Tensor:
    return weight.to_local() if _is_distributed(weight) else weight


def _like(weight: Any, places: Any) -> Any:
    if not _is_distributed(weight):
        return places
    sharding = (weight.device_mesh, weight.placements)
    return type(weight).from_local(places, *sharding, run_check=False)


def _shaped(weight: Tensor, shape: list[int]) -> Tensor:
    """Views weight as shape, or returns the parameter itself, which a queue must know."""
    return weight if list(weight.shape) == shape else weight.view(shape)
