"""What everyone says about multi-head attention, measured: each sentence an experiment with a verdict."""
