"""Decoders from GGUF files: weights, shape and vocabulary, read without another package."""
