"""Which heads matter, and a smaller model without the others."""
