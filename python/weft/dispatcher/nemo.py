# SPDX-License-Identifier: Apache-2.0
"""The phases of the flex dispatcher as NeMo Automodel names them."""

from __future__ import annotations

from typing import Any

import torch

from .config import option

Tensor = torch.Tensor


class NemoPhases:
    """Mixed into the flex dispatcher. T: tokens of this rank, K: choices of a token."""

    config: Any
    _comm_manager: Any

    def _preprocess_probs(
        self, hidden_states: Tensor, num_local_tokens: int | None, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """hidden [..., H], probs [T, E] -> hidden [T, H] and the probabilities that travel."""
        tokens = self._flatten(hidden_states)
        num_tokens = tokens.shape[0] if num_local_tokens is None else num_local_tokens
        probs = self._initialize_metadata(probs.reshape(num_tokens, self.num_experts))
        if self._is_by_expert:
            self._comm_manager.setup_metadata(probs != 0, probs)
        else:
            self._comm_manager.setup_metadata(num_tokens, probs)
        return tokens, self._comm_manager.token_probs

    def dispatch_preprocess2(
        self,
        hidden_states: Tensor,
        num_local_tokens: int,
        token_probs: Tensor,
        token_indices: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """hidden [..., H]; token_probs [T, K]; token_indices int64 [T, K], -1 for no choice."""
        del num_local_tokens  # the tensors say it
        tokens = self._flatten(hidden_states)
        if self._is_by_expert:
            flags = self.hybridep_metadata_processor(token_indices, token_probs)
            self._comm_manager.setup_metadata(*flags)
        else:
            self._comm_manager.setup_metadata_from_indices(token_indices, token_probs)
        return tokens, self._comm_manager.token_probs

    def dispatch_all_to_all(
        self,
        hidden_states: Tensor,
        probs: Tensor | None = None,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Collective: token_dispatch by its other name."""
        return self.token_dispatch(hidden_states, probs, async_finish, allocate_on_comm_stream)

    def combine_all_to_all(
        self,
        hidden_states: Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> Tensor:
        """Collective: token_combine by its other name."""
        return self.token_combine(hidden_states, async_finish, allocate_on_comm_stream)

    def token_permutation(
        self, hidden_states: Tensor, num_local_tokens: int, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Collective. All phases of dispatch for dense probs [T, E].

        Returns rows by expert [P, H], tokens_per_expert int64 [El], probs [P].
        """
        tokens, _ = self._preprocess_probs(hidden_states, num_local_tokens, probs)
        return self._dispatch_phases(tokens)

    def token_permutation2(
        self,
        hidden_states: Tensor,
        num_local_tokens: int,
        token_probs: Tensor,
        token_indices: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Collective. All phases of dispatch for top-k choices; see dispatch_preprocess2."""
        tokens, _ = self.dispatch_preprocess2(
            hidden_states, num_local_tokens, token_probs, token_indices
        )
        return self._dispatch_phases(tokens)

    def token_unpermutation(self, hidden_states: Tensor) -> Tensor:
        """Collective. All phases of combine: rows by expert [P, H] -> the shape of the input."""
        rows = self.combine_preprocess(hidden_states)
        is_async = self._is_async()
        return self.combine_postprocess(self.token_combine(rows, is_async, is_async))

    def _dispatch_phases(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        is_async = self._is_async()
        rows, probs = self.token_dispatch(tokens, None, is_async, is_async)
        return self.dispatch_postprocess(rows, probs)

    def _is_async(self) -> bool:
        return not self._is_by_expert and option(self.config, "moe_deepep_async_dispatch")
