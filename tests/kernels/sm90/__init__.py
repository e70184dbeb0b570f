"""The Hopper kernels in the emulator."""
