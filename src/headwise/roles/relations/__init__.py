"""Which heads follow a relation between words, against gold annotation."""
