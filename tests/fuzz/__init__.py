"""A differential fuzz over the public API: random jobs under pressure, each compared with a run by itself."""
