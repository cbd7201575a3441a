"""Paged KV memory: which request has which row, which pages are handed out, and the K and V themselves."""

from .kv_pool import HostKV, KVPool
from .memory_pool import ReqToTokenPool, TokenToKVPoolAllocator

__all__ = ["HostKV", "KVPool", "ReqToTokenPool", "TokenToKVPoolAllocator"]
