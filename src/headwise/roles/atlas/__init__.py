"""What every head does on a corpus: streamed statistics, roles, baselines and intervals."""
