"""Text to token ids and back, streams of text, documents of any kind of file. Never torch."""
