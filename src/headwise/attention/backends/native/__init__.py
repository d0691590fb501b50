"""Attention and exact statistics in one native pass on the CPU.

attention.c says how, threads.c shares the work, native.py calls it on tensors, ops.py puts it into graphs.
"""
