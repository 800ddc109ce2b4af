"""Policies by name: the embedded one, a local folder or a Hub id, and the recipe of the first."""
