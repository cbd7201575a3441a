"""C++ kernels for a CPU, compiled at first use."""
