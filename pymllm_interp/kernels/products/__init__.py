"""Triton kernels of products other than dense ones: quantised weights, experts, adapters."""
