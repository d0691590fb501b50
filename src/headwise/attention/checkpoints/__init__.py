"""Published checkpoints in the stacks of `nn`."""
