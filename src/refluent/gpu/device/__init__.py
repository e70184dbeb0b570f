"""Device code that the architectures share: lengths, visible ranges, work order, copies, numerics."""
