"""Backends of scheduled sweeps: where a job runs and how it is submitted, watched and stopped."""
