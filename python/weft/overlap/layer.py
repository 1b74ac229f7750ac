# SPDX-License-Identifier: Apache-2.0
"""A transformer layer of ordinary modules, cut where a schedule cuts it.

Called as a module it runs its pieces one after another, in one graph: what a schedule's results
are compared with.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .rules import check_recompute


class TransformerLayer(nn.Module):
    """x [..., H] -> [..., H]: attention and a dense or an MoE part, both beside a residual."""

    def __init__(
        self,
        attention: nn.Module,
        *,
        mlp: nn.Module | None = None,
        moe: Any = None,
        pre_mlp_norm: nn.Module | None = None,
        shared_experts: nn.Module | None = None,
        recompute_modules: Sequence[str] = (),
    ) -> None:
        """attention(x) or attention(x, mask) -> the branch beside the residual, its norm included.

        Either `mlp`, or `moe` with dispatcher, route and experts as in `weft.examples.layer`.
        shared_experts: every token's experts, beside the routed ones.
        recompute_modules: "core_attn" (all of `attention`), "layernorm", "mlp" and
        "shared_experts" are done again in the backward; others are for the modules themselves.
        final_norm: set on the last layer of a model.
        Raises ValueError for both or none of mlp and moe, and see `check_recompute`.
        """
        super().__init__()
        if (mlp is None) == (moe is None) or (moe is None and shared_experts is not None):
            raise ValueError("layer: expected mlp, or moe with or without shared_experts")
        check_recompute(recompute_modules)
        self.attention = attention
        self.mlp = mlp
        self.moe = moe
        self.pre_mlp_norm = nn.Identity() if pre_mlp_norm is None else pre_mlp_norm
        self.shared_experts = shared_experts
        self.final_norm: nn.Module | None = None
        self.recompute_modules = tuple(recompute_modules)

    @property
    def is_moe(self) -> bool:
        return self.moe is not None

    @property
    def dispatcher(self) -> Any:
        return self.moe.dispatcher

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not self.is_moe:
            return self.dense(self.attend(x, mask))
        hidden, probs, residual, shared_output = self.pre_dispatch(x, mask)
        rows = self.compute(*self.dispatch(hidden, probs))
        return self.combine(rows, residual, shared_output)

    # The content of the nodes. `slot` says whose weight gradients belong to which.

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        given = (x,) if mask is None else (x, mask)
        return x + self._run("core_attn", self.attention, *given)

    def pre_dispatch(
        self, x: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """-> what travels and its probabilities, the residual, the shared experts' output."""
        residual = self.attend(x, mask)
        y = self._run("layernorm", self.pre_mlp_norm, residual)
        shared_output = None
        if self.shared_experts is not None:
            shared_output = self._run("shared_experts", self.shared_experts, y)
        routing = self.moe.route(y.reshape(-1, y.shape[-1]))
        hidden, probs = self.dispatcher.dispatch_preprocess(y, *routing)
        return hidden, probs, residual, shared_output

    def dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Collective. -> rows as they arrive, and their probabilities."""
        return self.dispatcher.token_dispatch(hidden, probs)

    def compute(self, rows: Tensor, row_probs: Tensor) -> Tensor:
        """The routed experts."""
        rows, counts, row_probs = self.dispatcher.dispatch_postprocess(rows, row_probs)
        return self.dispatcher.combine_preprocess(self.moe.experts(rows, counts, row_probs))

    def combine(self, rows: Tensor, residual: Tensor, shared_output: Tensor | None) -> Tensor:
        """Collective. -> the layer's output."""
        y = self.dispatcher.combine_postprocess(self.dispatcher.token_combine(rows))
        if shared_output is not None:
            y = y + shared_output
        return self._finish(residual + y)

    def dense(self, x: Tensor) -> Tensor:
        y = self._run("layernorm", self.pre_mlp_norm, x)
        return self._finish(x + self._run("mlp", self.mlp, y))

    def slot(self, node: str) -> list[nn.Module]:
        """The modules that run in "pre_dispatch" or "mlp"."""
        if node == "mlp":
            return [self.moe.experts] if self.is_moe else [self.pre_mlp_norm, self.mlp]
        if not self.is_moe:
            return [self.attention]
        routers = [part for name, part in self.moe.named_children() if name != "experts"]
        shared = [] if self.shared_experts is None else [self.shared_experts]
        return [self.attention, self.pre_mlp_norm, *shared, *routers]

    def _finish(self, x: Tensor) -> Tensor:
        return x if self.final_norm is None else self.final_norm(x)

    def _run(self, name: str, piece: Callable[..., Tensor], *args: Tensor) -> Tensor:
        if name in self.recompute_modules and torch.is_grad_enabled():
            return checkpoint(piece, *args, use_reentrant=False)
        return piece(*args)
