"""Paged KV memory: which request has which row, which pages are handed out, and the K and V themselves."""

from .memory_pool import HostKV, KVPool, ReqToTokenPool, TokenToKVPoolAllocator

__all__ = ["HostKV", "KVPool", "ReqToTokenPool", "TokenToKVPoolAllocator"]
