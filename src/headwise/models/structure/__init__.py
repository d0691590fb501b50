"""Where a model keeps its attention: layers (`sites`), W_O and head counts (`heads`), W_Q, W_K, W_V (`projections`)."""
