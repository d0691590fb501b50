"""What each head does: statistics over a corpus, roles against a baseline, relations against gold annotation."""
