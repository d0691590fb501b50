"""Roles of decoder heads that need inputs of their own: needles, long texts, ordered sets, few-shot prompts.

`roles/atlas/probes` measures them, on request.
"""

from __future__ import annotations

from .registry import CAUSAL, RoleDefinition, add_probe_score, add_role

KEEP_FIRST = 4  # keys at the beginning of a text that a streaming head keeps
WINDOW = 256  # keys before a query that it keeps, the query's own included
SMALLER_WINDOWS = (16, 64)  # scores without a role
OURS = "ours: "


def streaming_score(window: int) -> str:
    """The name of the score of a window."""
    return "streaming" if window == WINDOW else f"streaming-{window}"


add_probe_score("retrieval", "how often its largest weight is on the needle's token that comes next, in long texts")
for _window in (*SMALLER_WINDOWS, WINDOW):
    add_probe_score(
        streaming_score(_window),
        f"weight on the first {KEEP_FIRST} and the last {_window} tokens, of queries that have more, in long texts",
    )
add_probe_score("copying", "its direct effect on the logit of the token it attends to most, beside the text's others")
add_probe_score("suppression", "the same with the sign reversed: how far it lowers that logit")
add_probe_score("successor", "how often its OV circuit raises a token's successor most, among days, numbers, letters")
add_probe_score("function", "rise of the right answer's probability by its mean output on prompts with examples")

add_role(RoleDefinition("retrieval", "retrieval", 0.1, (CAUSAL,), "Wu et al. 2024"), __name__)
add_role(
    RoleDefinition(
        "streaming",
        "streaming",
        0.95,
        (CAUSAL,),
        OURS + "all but a twentieth of the weight",
        unless=("retrieval",),
        lift=1.0,
        reach_only=True,
    ),
    __name__,
)
_odds = OURS + "a tenth of a logit over all tokens, 10 % of the odds"
add_role(RoleDefinition("copying", "copying", 0.1, (CAUSAL,), _odds), __name__)
add_role(RoleDefinition("suppression", "suppression", 0.1, (CAUSAL,), _odds), __name__)
add_role(RoleDefinition("successor", "successor", 0.5, (CAUSAL,), OURS + "half of the tokens"), __name__)
add_role(
    RoleDefinition("function", "function", 0.01, (CAUSAL,), OURS + "a hundredth of the probability"),
    __name__,
)
