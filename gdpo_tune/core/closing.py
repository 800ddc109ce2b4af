"""Moved to `system`; this file goes once every room imports from there."""

from gdpo_tune.core.system import Closing as Closing
