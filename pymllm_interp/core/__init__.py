"""Plain data that all rooms may import; it imports no other room."""
