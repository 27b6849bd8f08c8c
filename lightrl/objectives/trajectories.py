"""Rows laid out as trajectories, so that into how many rows one was cut changes nothing.

A trajectory whose history was rewritten on the way is several rows. Whatever counts, averages or compares attempts
(estimators, loss weights, ratios of whole responses) works on rows that hold one trajectory each.
"""

from __future__ import annotations

import torch
from torch import Tensor


def first_rows(trajectory_ids: Tensor) -> Tensor:
    """Numbers of the rows with which the trajectories of (B,) `trajectory_ids` begin, ascending."""
    return _firsts(trajectory_ids.unique(return_inverse=True)[1]).sort().values


def last_rows(trajectory_ids: Tensor) -> Tensor:
    """(B,) number of the last row of each row's trajectory."""
    index = trajectory_ids.unique(return_inverse=True)[1]
    rows = torch.arange(len(index), device=index.device)
    return rows.clone().scatter_reduce_(0, index, rows, "amax", include_self=False)[index]


def trajectory_lengths(mask: Tensor, trajectory_ids: Tensor) -> Tensor:
    """(B,) number of tokens on the (B, T) mask in all rows of the row's trajectory."""
    index = trajectory_ids.unique(return_inverse=True)[1]
    lengths = mask.sum(1)
    return torch.zeros_like(lengths).index_add_(0, index, lengths)[index]


def _firsts(index: Tensor) -> Tensor:
    """Per trajectory number, its first row."""
    count = int(index.max()) + 1 if len(index) else 0
    rows = torch.arange(len(index), device=index.device)
    return torch.full((count,), len(index), device=index.device).scatter_reduce_(0, index, rows, "amin")


class TrajectoryLayout:
    """Moves tensors between B rows and the n trajectories that they belong to.

    A trajectory's tokens on the mask, of all its rows one after another, make one row of (n, S) tensors. Where every
    trajectory is one row already, nothing is moved: `join` and `split` give back what they get.

    Args:
        trajectory_ids: (B,) int64, equal for the rows of a trajectory.
        mask: (B, T) bool, the tokens to move: each sampled token is in one row only.
        on_host: `trajectory_ids` in host memory, where there is a copy: then rows that are not cut cost no read.

    Attributes:
        is_cut: whether any trajectory has several rows.
        mask: (n, S) bool, True on tokens; the one given where nothing is cut.
    """

    def __init__(self, trajectory_ids: Tensor, mask: Tensor, on_host: Tensor | None = None) -> None:
        self._row_mask = mask
        self.mask = mask
        self.is_cut = on_host is None or len(on_host.unique()) < len(on_host)
        if not self.is_cut:
            return
        unique, self._index = trajectory_ids.unique(return_inverse=True)
        self.is_cut = len(unique) < len(trajectory_ids)
        if not self.is_cut:
            return
        rows, columns = mask.nonzero(as_tuple=True)
        owners = self._index[rows]
        order = owners.argsort(stable=True)
        self._rows = rows[order]
        self._columns = columns[order]
        self._owners = owners[order]
        counts = owners.bincount(minlength=len(unique))
        begins = counts.cumsum(0) - counts
        self._slots = torch.arange(len(order), device=mask.device) - begins[self._owners]
        self._firsts = _firsts(self._index)
        slots = torch.arange(max(int(counts.max()), 1), device=mask.device)
        self.mask = slots < counts[:, None]

    def join(self, x: Tensor) -> Tensor:
        """(B, T) to (n, S), 0 off the mask; (B,), the same in all rows of a trajectory, to (n,). Differentiable."""
        if not self.is_cut:
            return x
        if x.ndim == 1:
            return x[self._firsts]
        joined = x.new_zeros(self.mask.shape)
        return joined.index_put((self._owners, self._slots), x[self._rows, self._columns])

    def split(self, x: Tensor) -> Tensor:
        """(n, S) back to (B, T), 0 off the mask; (n,) to (B,). Differentiable."""
        if not self.is_cut:
            return x
        if x.ndim == 1:
            return x[self._index]
        split = x.new_zeros(self._row_mask.shape)
        return split.index_put((self._rows, self._columns), x[self._owners, self._slots])
