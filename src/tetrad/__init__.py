"""tetrad: DeepSeek-V4 inference with a 4-bit lightning-indexer key cache.

``LLM`` continues prompts, ``LLMEngine`` serves requests step by step, ``tetrad.ops`` are the kernels alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tetrad.engine.args import EngineArgs as EngineArgs
    from tetrad.engine.llm import LLM as LLM
    from tetrad.engine.llm_engine import LLMEngine as LLMEngine
    from tetrad.engine.sampling_params import SamplingParams as SamplingParams
    from tetrad.engine.selection_recorder import SelectionRecorder as SelectionRecorder

__version__ = "0.1.0"

_HOMES = {
    "EngineArgs": "tetrad.engine.args",
    "LLM": "tetrad.engine.llm",
    "LLMEngine": "tetrad.engine.llm_engine",
    "SamplingParams": "tetrad.engine.sampling_params",
    "SelectionRecorder": "tetrad.engine.selection_recorder",
}
__all__ = ["LLM", "EngineArgs", "LLMEngine", "SamplingParams", "SelectionRecorder", "__version__"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``tetrad.ops`` and ``tetrad.formats`` work without the engine."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tetrad' has no attribute {name!r}")
