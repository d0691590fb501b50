"""Whether the heads of a role matter more than random heads."""
