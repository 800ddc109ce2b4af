"""Vocabulary and helpers that every room may import; this room imports nothing of the package."""
