"""Every campaign in its short form; `make campaign` runs the long ones."""

from __future__ import annotations

from types import ModuleType

import pytest

from campaigns import campaigns

CAMPAIGNS = dict(campaigns())


@pytest.mark.parametrize("campaign", CAMPAIGNS.values(), ids=list(CAMPAIGNS))
def test_campaign_finds_no_failure(campaign: ModuleType) -> None:
    report = campaign.campaign(campaign.SHORT, seed=20261116)
    assert report.tries >= campaign.SHORT
    assert not report.failures, "\n".join([str(report), *report.failures[:20]])
