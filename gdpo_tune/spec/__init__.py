"""The YAML of a sweep as frozen models, or every error in it at once."""

from gdpo_tune.spec.gpu import read_device_memory
from gdpo_tune.spec.load import load_spec
from gdpo_tune.spec.model import Resources, SweepSpec

__all__ = ["Resources", "SweepSpec", "load_spec", "read_device_memory"]
