"""Texts from outside in Markdown: what it would interpret is escaped, ordinary prose stays readable."""

from __future__ import annotations

import pytest

from headwise.markdown import escape


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("Recovery: 25 steps, not worth it:", "Recovery: 25 steps, not worth it:"),
        ("see https://example.org", r"see https\://example.org"),
        (":smile: and :+1:", r"\:smile: and \:+1:"),
        ("a_b | c*d", r"a\_b \| c\*d"),
    ],
)
def test_only_what_markdown_interprets_is_escaped(text: str, escaped: str) -> None:
    assert escape(text) == escaped
