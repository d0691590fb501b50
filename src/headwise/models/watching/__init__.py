"""Statistics of every head while a model runs."""
