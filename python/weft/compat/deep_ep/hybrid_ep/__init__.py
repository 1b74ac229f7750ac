# SPDX-License-Identifier: Apache-2.0
"""`HybridEPBuffer`, the interface of the hybrid-ep branch of DeepEP."""

from .buffer import HybridEPBuffer as HybridEPBuffer
