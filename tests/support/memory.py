"""Prototype shim: the old names on top of `TrialMemory`."""
from dataclasses import dataclass, replace
from gdpo_tune.spec.gpu import measure_trial

@dataclass(frozen=True)
class Layout:
    workers: int = 1
    shards: int = 1
    averages: int = 8
    trials: int = 1

def measure_trainer(spec, size, layout=None):
    m = measure_trial(spec, size)
    if layout is not None:
        m = replace(m, workers=layout.workers, shards=layout.shards, moment_bytes=layout.averages, trials=layout.trials)
    return m

def measure_engine(spec, size, layout=None):
    return measure_trainer(spec, size, layout).engine

def compute_least_share(spec, size, device, reference=True):
    m = measure_trial(spec, size)
    m = m if reference else replace(m, has_reference=False)
    return m.least_room / device

def fits_in(spec, size, room, layout=None):
    return measure_trainer(spec, size, layout).fits(room)

def count_trials_that_fit(spec, size, room, most):
    m = measure_trial(spec, size)
    return next((n for n in range(most, 0, -1) if replace(m, trials=n).fits(room)), 0)

def read_layout(spec):
    r, o = spec.resources, spec.training.optimizer
    return Layout(r.workers, r.workers if r.shards_policy else 1, 2 if o == "adamw_8bit" else 8, r.trials_per_process)

def list_remedies(spec, size, device):
    from gdpo_tune.spec import gpu
    return gpu.list_remedies(spec, measure_trial(spec, size), device)
