"""The Hopper backward: one file a warp role, kernel.py assembles them."""
