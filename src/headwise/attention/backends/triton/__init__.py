"""Attention and exact statistics in one pass on a GPU, in Triton."""
