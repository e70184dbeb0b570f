"""Kernels for Hopper (compute capability 9.0)."""
