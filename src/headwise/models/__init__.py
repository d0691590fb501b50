"""Everything that knows transformers: loading, watching and masking the heads of its models."""
