"""The statistics that are recorded of every head, and what they mean."""

from __future__ import annotations

# exact, over all real queries of the recorded step
EXACT = {
    "entropy": "mean entropy of the attention weights, in nats",
    "max_logit": "largest score scale · q·k, before softcap and mask",
    "first": "mean weight on the first token of the sequence",
    "sink": "mean weight on the learned sink",
    "confidence": "mean of the largest weight of each query",
}
# on sampled queries of the recorded step
SAMPLED = {
    "output": "root mean square norm of the head's output before W_O, as a share of its layer's mean",
    "twin": "correlation of its weights with those of the most similar head of its layer",
}
STATISTICS = {**EXACT, **SAMPLED}
SHARES = ("first", "sink", "confidence", "twin")  # from 0 to 1
