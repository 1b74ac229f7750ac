# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that the backward leaves for later, to be computed while tokens travel.

linear = DelayedLinear(64, 64, delay_wgrad_compute=True)
linear(x).sum().backward()    # x.grad is there, linear.weight.grad is not
linear.backward_dw()          # now it is
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional


class WeightGradientQueue:
    """Computations of gradients, the oldest first."""

    def __init__(self) -> None:
        self._pending: deque[tuple[nn.Parameter, Callable[[], Tensor]]] = deque()
        self._hooks: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, weight: nn.Parameter, gradient: Callable[[], Tensor]) -> None:
        self._pending.append((weight, gradient))

    def add_hook(self, hook: Callable[[], None]) -> None:
        """Adds a hook for each time `run` has emptied the queue, e.g. to reduce gradients."""
        self._hooks.append(hook)

    def run(self) -> None:
        """Adds every pending gradient to `weight.grad`, then calls the hooks, if any was pending.

        What throws is dropped; the rest stays for `clear`.
        """
        if not self._pending:
            return
        with torch.no_grad():
            while self._pending:
                weight, gradient = self._pending.popleft()
                value = gradient()
                if weight.grad is None:
                    weight.grad = value
                else:
                    weight.grad += value
        for hook in self._hooks:
            hook()

    def clear(self) -> None:
        """Drops what is pending, for a schedule that was stopped."""
        self._pending.clear()


def now_or_later(
    queue: WeightGradientQueue | None, weight: nn.Parameter, gradient: Callable[[], Tensor]
) -> Tensor | None:
    """Returns the gradient of `weight`; None if a queue gets the computation."""
    return gradient() if queue is None else queue.put(weight, gradient)


class DelayedWgradModule(nn.Module):
    """A module whose parameters in `delayed_weights` get their gradients in `backward_dw()`."""

    def __init__(self, delay_wgrad_compute: bool = False) -> None:
        super().__init__()
        self.delay_wgrad_compute = delay_wgrad_compute
        self.wgrad_queue = WeightGradientQueue()

    def delay(self, *weights: nn.Parameter) -> None:
        """These have no gradient after the backward: data parallelism hooks the module instead."""
        for weight in weights:
            weight.skip_backward_post_hook = self.delay_wgrad_compute

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """`hook` is called after each `backward_dw()` that had something to do."""
        self.wgrad_queue.add_hook(hook)

    def backward_dw(self) -> None:
        """Adds the weight gradients of all backwards since the last call."""
        self.wgrad_queue.run()

    def _queue(self) -> WeightGradientQueue | None:
        return self.wgrad_queue if self.delay_wgrad_compute else None


class DelayedLinear(DelayedWgradModule):
    """x [..., in] -> [..., out], as nn.Linear. The bias has its gradient after the backward."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__(delay_wgrad_compute)
        plain = nn.Linear(in_features, out_features, bias)
        self.weight, self.bias = plain.weight, plain.bias
        self.delay(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        out = _Linear.apply(x, self.weight, self._queue())
        return out if self.bias is None else out + self.bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, queue):  # noqa: ANN001, ANN205
        ctx.save_for_backward(x, weight)
        ctx.queue, ctx.weight = queue, weight
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        x, weight = ctx.saved_tensors  # under autocast of other types than grad
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight.to(grad.dtype)).to(x.dtype)

        def gradient() -> Tensor:
            rows = x.reshape(-1, x.shape[-1]).to(grad.dtype)
            return (grad.reshape(-1, grad.shape[-1]).T @ rows).to(weight.dtype)

        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = now_or_later(ctx.queue, ctx.weight, gradient)
        return grad_x, grad_weight, None


def delayed_modules(modules: Iterable[nn.Module | None]) -> Iterator[nn.Module]:
    """The outermost modules in these that have a `backward_dw`, in order."""
    for module in modules:
        if module is None:
            continue
        if hasattr(module, "backward_dw"):
            yield module
        else:
            yield from delayed_modules(module.children())


def drop_pending(*modules: nn.Module) -> None:
    """Drops the weight gradients that no `backward_dw()` will be called for."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, DelayedWgradModule):
                part.wgrad_queue.clear()
