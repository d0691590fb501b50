"""Models and tokenizers by name, directory or file."""
