"""Figures of a sweep: an interactive report, and the front as a still picture."""
