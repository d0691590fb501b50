"""What a config.json says about towers, layers and heads."""
