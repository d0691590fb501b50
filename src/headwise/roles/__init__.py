"""What each head of a model does: statistics over a corpus, roles, relations against gold annotation."""
