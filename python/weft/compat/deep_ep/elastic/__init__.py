# SPDX-License-Identifier: Apache-2.0
"""`ElasticBuffer`, the interface of DeepEP V2."""

from .buffer import ElasticBuffer as ElasticBuffer
from .handle import EPHandle as EPHandle
