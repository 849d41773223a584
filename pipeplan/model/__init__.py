"""What is trained: a Hugging Face config or a factory becomes a list of layers."""
