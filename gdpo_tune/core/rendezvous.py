"""Environment variables by which the processes of one training meet; this imports no torch."""

from __future__ import annotations

import os
import socket

RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which the processes of one training find each other."""
MPI = ("PMI_", "PMIX_", "OMPI_", "MV2_", "MPI_LOCAL")
"""Beginnings of the variables of MPI's launchers, which Accelerate reads in the same way."""


def clear_rendezvous() -> None:
    """Delete the variables that a trial of one process has inherited from a launcher.

    Two such trials would share a `MASTER_PORT`, and one with a `WORLD_SIZE` would wait for others.
    """
    for name in [*RENDEZVOUS, *(name for name in os.environ if name.startswith(MPI))]:
        os.environ.pop(name, None)


def find_free_port() -> int:
    """Return a port that the system has just given and taken back."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
