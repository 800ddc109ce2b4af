"""Databases that tests share, because MLflow takes seconds for its tables."""

import shutil

import pytest


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """A SQLite file with MLflow's tables."""
    from gdpo_tune.tracking.mlflow_writer import create_database  # this file is in every test run

    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    create_database(path)
    return path


@pytest.fixture
def store(tmp_path, empty_database):
    """URI of a SQLite file that holds nothing yet."""
    return f"sqlite:///{shutil.copy(empty_database, tmp_path / 'mlflow.db')}"
