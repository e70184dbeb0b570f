"""Checks: what a kernel does wrong though it may compute the right numbers."""
