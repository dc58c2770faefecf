"""Model formats to and from the bundle."""
