"""Text to token ids and back, streams of text, documents in files of any kind. Never torch."""
