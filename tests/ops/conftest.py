"""Fixtures for the tests of ops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tetrad.ops import backends


@pytest.fixture
def all_proven(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Back ends that are not chosen yet are chosen here: that is how a device comes to run them."""
    monkeypatch.setattr(backends, "UNPROVEN", {})
    backends.choose_backend.cache_clear()
    backends.backend_module.cache_clear()
    yield
    backends.choose_backend.cache_clear()
    backends.backend_module.cache_clear()
