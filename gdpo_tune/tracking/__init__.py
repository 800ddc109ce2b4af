"""Listeners that report a sweep elsewhere: to MLflow, and to the webhook of `notify:`.

Neither ever delays the sweep.
"""

from gdpo_tune.tracking.mlflow_sink import MlflowTracker
from gdpo_tune.tracking.server import check_server
from gdpo_tune.tracking.sweep_notifier import SweepNotifier

__all__ = ["MlflowTracker", "SweepNotifier", "check_server"]
