"""An attempt at a trial whose folder is on an object store: down, train, up at each checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import tune

from gdpo_tune.core.errors import StoreError, StoreUnreachableError
from gdpo_tune.core.object_store import ObjectFolder, joined
from gdpo_tune.core.trials import Measurement, Outcome, TrialConfig
from gdpo_tune.tuning.ray.lost import StoreAwayError
from gdpo_tune.tuning.ray.mirror import Mirror, own_folder
from gdpo_tune.tuning.ray.reporter import HALT, Reporter
from gdpo_tune.tuning.ray.setup import Setup, Store
from gdpo_tune.tuning.ray.trainable import attempt
from gdpo_tune.tuning.ray.window import Window


def attempt_on_store(
    trial: TrialConfig, setup: Setup, store: Store, config: dict[str, Any]
) -> dict[str, Any]:
    """Train a trial from its newest checkpoint in the store on; see `trainable.serve`.

    Args:
        trial: its folder is the driver's.
        setup: of all trials.
        store: where they are kept.
        config: of this one.

    Raises:
        StoreAwayError: the store has not answered for a long time.
    """
    number = trial.directory.name
    own = own_folder()
    here = replace(trial, directory=own / "trials" / number)
    try:
        files = ObjectFolder(joined(store.address, "trials", number), say=say_to_driver)
        mirror = Mirror(files, here.directory)
        mirror.down(config["begun"])
        reporter = StoredReporter(trial, setup, config["ends_at"], mirror, store.window)
        try:
            answer = attempt(here, setup, reporter)
        except StoreUnreachableError:
            raise
        except Exception:
            mirror.up()  # its measurements tell why
            raise
        mirror.up()
    except StoreUnreachableError as error:
        raise StoreAwayError(error) from error
    except StoreError as error:
        return {"fatal": error}
    finally:
        shutil.rmtree(own, ignore_errors=True)
    outcome: Outcome | None = answer.get("outcome")
    if outcome is not None and outcome.checkpoint is not None:
        there = trial.directory / outcome.checkpoint.name
        return {"outcome": replace(outcome, checkpoint=there)}
    return answer


def say_to_driver(what: str) -> None:
    """Let the driver note what this trial waits for."""
    tune.report({"note": what})


class StoredReporter(Reporter):
    """The `report` of such a trial: nobody hears of a checkpoint before the store has it."""

    def __init__(
        self,
        trial: TrialConfig,
        setup: Setup,
        ends_at: Collection[int],
        mirror: Mirror,
        window: str,
    ) -> None:
        super().__init__(trial, setup.stop, ends_at, setup.pace)
        self._files = (setup.stop, trial.directory / HALT)
        self._mirror = mirror
        self._window = Window(window)

    def __call__(self, measurement: Measurement, checkpoint: Path | None) -> None:
        """See `Reporter`."""
        if checkpoint is not None:
            self._mirror.up()
        super().__call__(measurement, checkpoint)

    def asked(self) -> bool:
        """Whether the driver wants the trial to end."""
        return self._window.exist(*self._files)
