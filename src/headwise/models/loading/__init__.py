"""Models and tokenizers by name, directory or file: `loader` (`headwise.load`), `resolve`, `locate` and `gguf`."""
