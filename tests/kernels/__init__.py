"""Our kernels in the emulator, against float64."""
