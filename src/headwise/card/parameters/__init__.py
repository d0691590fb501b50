"""Exact parameter counts: `facts` is a row about a model type, `table` finds it, `totals` counts a whole model.

Nothing here is public: `headwise.card.Card.parameters` has the counts.
"""
