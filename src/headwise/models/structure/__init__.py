"""Where a model keeps its heads and projections."""
