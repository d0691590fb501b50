"""The native kernel: attention and exact statistics in one pass on the CPU, in C."""
