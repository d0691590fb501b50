"""Attention and exact statistics in one native pass on the CPU. The C source says how; native.py calls it."""
