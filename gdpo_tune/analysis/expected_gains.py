"""Hypervolume that a point with normal errors is expected to add to a front.

Shapes: N points, F members of the front, M objectives, K edges of an objective. Everything is a
loss: smaller is better.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from gdpo_tune.analysis.pareto import Floats

MOST_CELLS = 2**15
"""Cells of the objective space; a front with more is rounded to a coarser grid."""
TINY = 1e-9
"""Smallest error, so that certain values divide nothing by 0."""


def compute_expected_gains(
    means: Floats, errors: Floats, front: Floats, reference: Floats
) -> Floats:
    """Compute the expected hypervolume that each of N normal points adds to a front, `float[N]`.

    The coordinates of the front divide the space below the reference into cells, each dominated by
    the front or not at all. A point y adds to a cell from l to u the volume of what lies in it
    above y, and objectives are independent, so with psi(u) = E[max(u - y, 0)] the expected gain is

        sum over cells that the front leaves free of  prod_m (psi(u_m) - psi(l_m))

    A grid with more than `MOST_CELLS` cells is rounded, so that the result is a little too high.

    Args:
        means: losses `[N, M]`; a row with NaN gains 0.
        errors: their standard errors, `[N, M]`.
        front: losses `[F, M]`.
        reference: losses `[M]`.
    """
    inside = front[(front < reference).all(axis=1)]
    most = max(2, int(MOST_CELLS ** (1 / len(reference))) - 1)
    edges = [np.unique(column) for column in inside.T]
    # At most `most` of them, evenly, the last one included.
    edges = [e[np.linspace(0, len(e) - 1, min(len(e), most)).round().astype(int)] for e in edges]
    free = np.ones([len(edge) + 1 for edge in edges], dtype=np.bool_)
    # Cell k of an objective reaches from edge k - 1 to edge k; a point on edge k covers k + 1 on.
    corners = [
        np.searchsorted(edge, column) + 1 for edge, column in zip(edges, inside.T, strict=True)
    ]
    free[tuple(corners)] = False
    for axis in range(free.ndim):
        free = np.logical_and.accumulate(free, axis=axis)
    volumes = np.empty(0)
    for column in range(len(reference)):
        uppers = np.append(edges[column], reference[column])
        widths = np.diff(
            compute_shortfalls(uppers, means[:, column], errors[:, column]), prepend=0.0
        )
        if column == 0:  # the largest step by far, as a product of matrices
            volumes = widths @ free.reshape(len(uppers), -1)
        else:
            volumes = np.einsum("nk,nkr->nr", widths, volumes.reshape(len(means), len(uppers), -1))
    return np.nan_to_num(volumes[:, 0])


def compute_shortfalls(bounds: Floats, means: Floats, errors: Floats) -> Floats:
    """Compute E[max(u - y, 0)] for bounds u `[K]` and normal y `[N]`, `float[N, K]`."""
    gaps, spread = bounds - means[:, None], np.maximum(errors, TINY)[:, None]
    z = gaps / spread
    return gaps * ndtr(z) + spread * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
