"""Sentences of our own grammar with exact gold links."""
