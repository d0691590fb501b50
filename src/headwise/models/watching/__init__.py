"""`headwise.watch`: exact statistics, weights, links and outputs of every head while a model runs.

`watcher` answers each attention call that `registry` intercepts: `call_reader` translates the call, `trust` compares
the translation with the model's own output, `recording` keeps what `request` asks for in `layers`.
"""
