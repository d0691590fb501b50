"""Heads changed while a model runs: `masking` (`headwise.mask_heads`) and `head_outputs` (a function before W_O)."""
