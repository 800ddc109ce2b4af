"""MLflow as a projection of the ledger: lossless, and never in the sweep's way."""

from gdpo_tune.tracking.mlflow_sink import MlflowSink
from gdpo_tune.tracking.server import check_server

__all__ = ["MlflowSink", "check_server"]
