"""Policies by name, which may be embedded, a directory or a Hub id; and how they read prompts."""
