"""Prompts through the engine: all of them at once, or a single one whose text is printed as it comes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TextIO

from tetrad.cli.progress import Progress
from tetrad.cli.prompts import Item
from tetrad.cli.results import Record, Results
from tetrad.cli.streams import write_line
from tetrad.errors import RequestError
from tetrad.frontend.llm_engine import LLMEngine
from tetrad.frontend.outputs import RequestOutput
from tetrad.frontend.token_meter import TokenMeter


@dataclass(slots=True)
class Work:
    """How far the prompts are; the thread that shows it reads this.

    Attributes:
        prompts: how many there are to do; ``done`` of them are, or have failed.
        limit: tokens that all of it can take, prompts and outputs.
        read, written: tokens of the prompts that are done, and of their outputs.
    """

    engine: LLMEngine
    prompts: int
    done: int = 0
    limit: int = 0
    read: int = 0
    written: int = 0
    start: float = field(default_factory=time.monotonic)
    _meter: TokenMeter = field(init=False)

    def __post_init__(self) -> None:
        self._meter = TokenMeter(self.engine)

    def begin(self, item: Item) -> str | None:
        """Queue a prompt. Returns the engine's name for it; None if it is refused, which the item then says."""
        try:
            name = self.engine.add_request(item.prompt, item.params)
        except RequestError as error:
            item.fail(error)
            return None
        request = self.engine.requests[name]
        self.limit += len(request.prompt_token_ids) + self._room(item, len(request.prompt_token_ids))
        return name

    def end(self, item: Item, output: RequestOutput) -> None:
        """Count a finished prompt."""
        read, written = len(output.prompt_token_ids), sum(len(choice.token_ids) for choice in output.outputs)
        self.done += 1
        self.read += read
        self.written += written
        self.limit -= self._room(item, read) - written
        if output.error is not None:
            item.fail(output.error)

    def _room(self, item: Item, read: int) -> int:
        return item.params.n * item.params.token_limit(self.engine.config.max_model_len - read)

    def state(self) -> str:
        """One line for the terminal."""
        tokens = f"{self._meter.tokens:,} of at most {self.limit:,} tokens"
        return tokens if self.prompts == 1 else f"{self.done} of {self.prompts} prompts done, {tokens}"

    def summary(self) -> str:
        """One line for the end."""
        seconds = time.monotonic() - self.start
        return f"{self.read} tokens read, {self.written} written in {seconds:.2f} s"


def serve(work: Work, items: list[Item], results: Results) -> None:
    """All prompts that have no result yet, at once. One that is refused is noted, the others go on."""
    running: dict[str, int] = {}
    with Progress(work.state):
        for place, item in enumerate(items):
            if results.has(place):
                continue
            name = work.begin(item) if item.error is None else None
            if name is not None:
                running[name] = place
            else:
                work.done += 1
                results.add(place, _record(item, None))
        while work.engine.has_unfinished_requests:
            for output in work.engine.step(finished_only=True):
                place = running.pop(output.request_id)
                work.end(items[place], output)
                results.add(place, _record(items[place], output))


def _record(item: Item, output: RequestOutput | None) -> Record:
    record = (output or RequestOutput("", None, [], [], finished=True)).to_dict()
    # the name comes first, whatever the order of the output's own keys
    record = {"request_id": item.name} | record | {"request_id": item.name, "error": item.error}
    return record if item.custom_id is None else record | {"custom_id": item.custom_id}


def stream(work: Work, item: Item, out: TextIO) -> None:
    """Print the text of one prompt as it comes, or its ids where the model has no tokenizer."""
    name = work.begin(item)
    if name is None:
        return
    shown = 0
    with Progress(work.state) as progress:
        try:
            while work.engine.has_unfinished_requests:
                for output in work.engine.step():
                    text = _text(work.engine, output)
                    if len(text) > shown:
                        progress.hide()
                        write_line(out, text[shown:], end="")
                        shown = len(text)
                    if output.finished:
                        work.end(item, output)
        except KeyboardInterrupt:
            if shown:
                write_line(out, "")
            raise
        progress.hide()
        if shown or item.error is None:
            write_line(out, "")


def _text(engine: LLMEngine, output: RequestOutput) -> str:
    choice = output.outputs[0]
    return choice.text if engine.tokenizer is not None else " ".join(map(str, choice.token_ids))
