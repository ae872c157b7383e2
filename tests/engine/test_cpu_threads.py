"""How many threads a step gets on a CPU, and that the process has its own number back afterwards."""

from __future__ import annotations

import pytest
import torch

from tests.engine.small import greedy, random_ids, small_config, small_engine, small_options
from tests.released import flash_document
from tetrad import EngineArgs, bundled
from tetrad.config import cpu_threads
from tetrad.config.cpu_threads import choose_cpu_threads, layer_weights
from tetrad.config.engine_config import EngineConfig
from tetrad.errors import ConfigError
from tetrad.models.config import ModelConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def untouched(monkeypatch):
    """A process where nobody has said how many threads there should be, on a machine of six."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(cpu_threads, "_own_defaults", lambda: {6})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)


@pytest.mark.usefixtures("untouched")
def test_auto_goes_by_the_size_of_the_model():
    """The bundled model took 60 s for 30 tokens with two threads on a busy machine, and 4 s with one."""
    assert choose_cpu_threads("auto", ModelConfig.from_pretrained(bundled.FOLDER), CPU).count == 1
    assert choose_cpu_threads("auto", small_config(), CPU).count == 1
    large = choose_cpu_threads("auto", ModelConfig.from_dict(flash_document()), CPU)
    assert large.count is None
    assert str(large).startswith("6: all cores")


@pytest.mark.usefixtures("untouched")
def test_a_number_wins_over_everything(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert choose_cpu_threads(5, small_config(), CPU).count == 5
    assert choose_cpu_threads("5", small_config(), CPU).count == 5
    assert choose_cpu_threads(5, small_config(), CUDA).count is None


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_auto_leaves_what_the_environment_says(monkeypatch, variable):
    monkeypatch.setenv(variable, "6")
    chosen = choose_cpu_threads("auto", small_config(), CPU)
    assert chosen.count is None
    assert variable in chosen.reason


@pytest.mark.usefixtures("untouched")
def test_auto_leaves_what_the_program_told_torch(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    chosen = choose_cpu_threads("auto", small_config(), CPU)
    assert chosen.count is None
    assert "set_num_threads" in chosen.reason


def test_the_number_that_torch_starts_with_is_known(monkeypatch):
    """Threads for each processor or for each core: a number of either kind is nobody's choice."""
    cores = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
    monkeypatch.setattr(cpu_threads.os, "sched_getaffinity", lambda _: set(cores), raising=False)
    monkeypatch.setattr(cpu_threads, "_core", cores.__getitem__)
    assert cpu_threads._own_defaults() == {4, 2}


@pytest.mark.parametrize("value", [0, -1, "0", "-2", "two", "", "1.5", "٢"])
def test_a_number_that_is_none(folder, value):
    with pytest.raises(ConfigError, match=r"cpu_threads .* give auto, or 1 or more"):
        EngineConfig.resolve(EngineArgs(**small_options(folder) | {"cpu_threads": value}))


def test_a_step_has_its_threads_and_the_process_its_own(folder):
    """The number is the process's: it is given back after every step, also after one that failed."""
    before = torch.get_num_threads()
    engine = small_engine(folder, cpu_threads=before + 2)
    assert torch.get_num_threads() == before
    seen = []
    handle = engine.runner.model.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    engine.add_request(random_ids(9, 1), greedy(max_tokens=1))
    engine.step()
    assert seen == [before + 2]
    assert torch.get_num_threads() == before
    handle.remove()

    def fail(*_):
        raise RuntimeError("a step failed")

    engine.runner.model.register_forward_pre_hook(fail)
    engine.add_request(random_ids(9, 1), greedy(max_tokens=1))
    assert engine.step() == [], "it is computed again"
    (output,) = engine.step()
    assert "RuntimeError: a step failed" in str(output.error)
    assert torch.get_num_threads() == before


def test_layer_weights_are_those_of_the_products():
    """Of the released Flash: 107 million in attention, 7 experts of 25 million."""
    assert layer_weights(ModelConfig.from_dict(flash_document())) == pytest.approx(107e6 + 7 * 25.2e6, rel=0.01)
