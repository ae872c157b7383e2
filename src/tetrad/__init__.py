"""tetrad: DeepSeek-V4 inference with a 4-bit lightning-indexer key cache.

``LLM`` continues prompts, ``LLMEngine`` serves requests step by step, ``tetrad.ops`` are the kernels alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tetrad.config.args import EngineArgs
    from tetrad.errors import CheckpointError, ConfigError, DeviceLostError, RequestError, TetradError
    from tetrad.frontend.llm import LLM
    from tetrad.frontend.llm_engine import LLMEngine
    from tetrad.frontend.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
    from tetrad.frontend.prompts import Prompt, TextPrompt, TokensPrompt
    from tetrad.frontend.sampling_params import SamplingParams
    from tetrad.frontend.selection_recorder import SelectionRecorder
    from tetrad.frontend.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DeviceLostError",
    "EngineArgs",
    "FinishReason",
    "LLMEngine",
    "Logprob",
    "Prompt",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SelectionRecorder",
    "TetradError",
    "TextPrompt",
    "Tokenizer",
    "TokensPrompt",
    "__version__",
]

_NAMES_OF = {
    "tetrad.config.args": ("EngineArgs",),
    "tetrad.frontend.llm": ("LLM",),
    "tetrad.frontend.llm_engine": ("LLMEngine",),
    "tetrad.frontend.outputs": ("CompletionOutput", "FinishReason", "Logprob", "RequestMetrics", "RequestOutput"),
    "tetrad.frontend.prompts": ("Prompt", "TextPrompt", "TokensPrompt"),
    "tetrad.frontend.sampling_params": ("SamplingParams",),
    "tetrad.frontend.selection_recorder": ("SelectionRecorder",),
    "tetrad.frontend.tokenizer": ("Tokenizer",),
    "tetrad.errors": ("CheckpointError", "ConfigError", "DeviceLostError", "RequestError", "TetradError"),
}
_HOMES = {name: home for home, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``tetrad.ops`` and ``tetrad.formats`` work without the engine."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tetrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What an interactive prompt completes, the names that are not imported yet included."""
    return sorted({*globals(), *__all__})
