"""Attention: the NumPy reference, the functions on tensors and their backends, statistics, modules and checkpoints."""
