"""The weights of single layers: made alone, read from and written to Hugging Face checkpoints."""
