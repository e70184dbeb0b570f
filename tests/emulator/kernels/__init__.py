"""Small CuTe DSL kernels, one mechanism each, written to be read; the tests run them in the emulator."""
