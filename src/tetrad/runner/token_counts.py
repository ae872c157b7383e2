"""Which tokens a growing list holds, for the penalties: each step looks at the new ones alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TokenCounts:
    """How often each id occurs in a list that only grows, in the order of their first occurrence."""

    def __init__(self, beginning: Sequence[int] = ()) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._times = np.zeros(64, dtype=np.int64)
        self._read = 0
        self._add(beginning)

    def of(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Reads what came to ``ids`` since the last call. (distinct ids, how often each), the beginning counted too."""
        self._add(ids[self._read :])
        self._read = len(ids)
        return self._ids[: len(self._place)], self._times[: len(self._place)]

    def _add(self, ids: Sequence[int]) -> None:
        for token_id in ids:
            place = self._place.setdefault(token_id, len(self._place))
            if place == len(self._ids):
                self._ids, self._times = (np.concatenate([old, np.zeros_like(old)]) for old in (self._ids, self._times))
            self._ids[place] = token_id
            self._times[place] += 1
