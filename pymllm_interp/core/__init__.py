"""Plain data that everybody may import; imports nothing of ours."""
