"""Policies by name: embedded ones, a local folder or a Hub id, and the recipe of the first."""
