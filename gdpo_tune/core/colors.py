"""Moved to `formatting`; this file goes once every room imports from there."""

from gdpo_tune.core.formatting import INK as INK
from gdpo_tune.core.formatting import MODE_COLORS as MODE_COLORS
from gdpo_tune.core.formatting import OTHER_COLOR as OTHER_COLOR
