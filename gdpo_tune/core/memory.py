"""Moved to `system`; this file goes once every room imports from there."""

from gdpo_tune.core.system import SHARE_FOR_CANDIDATES as SHARE_FOR_CANDIDATES
from gdpo_tune.core.system import candidates_at_once as candidates_at_once
from gdpo_tune.core.system import machine_memory as machine_memory
