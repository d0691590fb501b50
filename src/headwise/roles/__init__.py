"""What each head does: statistics over a corpus, roles measured against a baseline, and what they are worth."""
