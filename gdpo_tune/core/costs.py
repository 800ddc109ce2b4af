"""Moved to `metrics`; this file goes once every room imports from there."""

from gdpo_tune.core.metrics import HOUR as HOUR
from gdpo_tune.core.metrics import gpu_hours as gpu_hours
from gdpo_tune.core.metrics import priced as priced
