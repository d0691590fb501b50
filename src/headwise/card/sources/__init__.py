"""What a card is read from: JSON files, safetensors and GGUF headers, pruned directories, famous names."""
