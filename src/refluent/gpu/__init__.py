"""Attention kernels for NVIDIA GPUs in the CuTe DSL; importing this package imports no CuTe DSL."""
