"""Heads removed from a model: `removal` (`headwise.prune_heads`), `saving` (`headwise.save`) and loading again.

`reshape` cuts one layer, `shared_biases` lets layers with different heads share a position bias, `kept_heads` records
which original heads are left, `pruned_directory` is that record as a file.
"""
