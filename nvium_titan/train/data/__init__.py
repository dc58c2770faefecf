"""Text for training: documents from files, corpora and the hub, packed into sequences."""
