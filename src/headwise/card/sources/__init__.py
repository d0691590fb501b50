"""What a card is read from: configs, safetensors and GGUF headers, pruned directories, famous names."""
