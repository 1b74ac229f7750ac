# SPDX-License-Identifier: Apache-2.0
"""`EPBuffer`, the interface of DeepEP 2.5."""

from .allocator import BufferAllocator as BufferAllocator
from .buffer import EPBuffer as EPBuffer
from .experimental import BucketBuffer as BucketBuffer
from .experimental import BucketSession as BucketSession
from .experimental import EngramBuffer as EngramBuffer
from .experimental import PPBuffer as PPBuffer
from .handle import EPBufferHandle as EPBufferHandle
