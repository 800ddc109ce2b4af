"""Fixtures of the tests of sweeps on a real Ray."""

from tests.support.ray_sweeps import importable as importable
