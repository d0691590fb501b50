"""Public names that are imported when they are used, and old ones of them."""

from __future__ import annotations

import pytest

from headwise import scale


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ring_attend", "context_parallel_attend"),
        ("ring_head_stats", "context_parallel_head_stats"),
        ("RingOptions", "ContextParallelOptions"),
    ],
)
def test_a_renamed_function_is_found_by_its_old_name_with_a_warning(old, new):
    with pytest.warns(DeprecationWarning, match=f"headwise.scale.{old} has been renamed to {new}"):
        assert getattr(scale, old) is getattr(scale, new)
    assert old not in dir(scale) and old not in scale.__all__


def test_a_name_that_never_was_is_refused():
    with pytest.raises(AttributeError, match="module 'headwise.scale' has no attribute 'ring'"):
        scale.ring  # noqa: B018
