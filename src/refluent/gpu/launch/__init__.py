"""Tensors -> kernel arguments, compile cache, streams."""
