"""What a config.json says: `node` reads keys with their defaults, `towers` finds the stacks, `layers` their heads."""
