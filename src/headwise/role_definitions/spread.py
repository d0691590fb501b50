"""Heads by the shape of their rows of weights: entropy, largest weight, and heads that attend to nearly everything."""

from __future__ import annotations

from .registry import ANY, RoleDefinition, add_role, add_row_score

add_row_score("entropy", "how widely a head spreads, in nats")
add_row_score("confidence", "its largest weight")
add_row_score("broad", "its entropy as a share of uniform attention's")
add_role(RoleDefinition("broad", "broad", 0.9, ANY, "nearly the maximum", relative=True), __name__)
