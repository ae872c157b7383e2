from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.small import small_engine, write_config, write_tokenizer
from tetrad import LLMEngine


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


@pytest.fixture
def text_engine(text_folder: Path) -> LLMEngine:
    return small_engine(text_folder)
