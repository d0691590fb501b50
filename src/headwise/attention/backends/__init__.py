"""The ways to compute an attention call: the native kernel, Triton, PyTorch's sdpa, blocks of query rows."""
