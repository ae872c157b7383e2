"""How many tokens an engine has computed, for who shows progress while a step of thousands of tokens runs."""

from __future__ import annotations

import weakref
from typing import Any

from tetrad.frontend.llm_engine import LLMEngine
from tetrad.runner.model_runner import ModelRunner


class TokenMeter:
    """Counts a step's tokens layer by layer, so that a long one is seen to go on. Another thread may read it."""

    def __init__(self, engine: LLMEngine) -> None:
        layers = engine.runner.model.layers
        self._engine, self._layers = engine, len(layers)
        self._passed = [0]  # the hooks hold this alone, so that they do not keep the engine
        runner = weakref.ref(engine.runner)
        for layer in layers:
            layer.register_forward_hook(_hook(self._passed, runner))

    @property
    def tokens(self) -> int:
        """Tokens since the engine was made; those of a preempted sequence count again."""
        # steps that call no layer, such as replayed ones, are in the engine's count
        return max(self._engine.computed_tokens, self._passed[0] // self._layers)


def _hook(passed: list[int], runner: weakref.ref[ModelRunner]) -> Any:
    def count(_module: Any, _inputs: Any, _output: Any) -> None:
        running = runner()
        passed[0] += 0 if running is None else running.rows_in_step

    return count
