"""MLflow as a projection of the ledger: it loses nothing and never delays the sweep."""

from gdpo_tune.tracking.mlflow_sink import MlflowSink
from gdpo_tune.tracking.server import check_server

__all__ = ["MlflowSink", "check_server"]
