from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.small import write_config, write_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    return write_config(tmp_path_factory.mktemp("models") / "ids-only")


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a byte-level tokenizer."""
    path = write_config(tmp_path_factory.mktemp("models") / "text")
    write_tokenizer(path)
    return path
