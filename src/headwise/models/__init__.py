"""Other people's models: where their heads are, how they are loaded, watched, masked, pruned and saved.

Only this package imports transformers' model code. `hooks` and `passes` are shared by watching and intervening.
"""
