"""Hugging Face model folders: their config.json, their tensors read, and folders written."""
