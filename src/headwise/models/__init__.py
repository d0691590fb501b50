"""The only place that knows transformers: loading, watching, masking and looking into its models."""
