# SPDX-License-Identifier: Apache-2.0
"""`HybridEPBuffer`, the interface of the hybrid-ep branch of DeepEP."""

from .buffer import HybridEPBuffer, indices_to_map

__all__ = ["HybridEPBuffer", "indices_to_map"]
