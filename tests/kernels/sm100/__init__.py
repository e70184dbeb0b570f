"""The Blackwell kernels in the emulator, feature by feature and in all pairs."""
