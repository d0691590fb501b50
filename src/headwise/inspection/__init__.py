"""One text through a model: what every head does with it, as values and in the terminal."""
