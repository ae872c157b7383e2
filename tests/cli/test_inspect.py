"""``tetrad inspect``: the numbers of the released models, which the literature gives, and what a device refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.small import small_config, write_config
from tests.released import flash_document, pro_document
from tetrad import EngineArgs, bundled
from tetrad.config.engine_config import EngineConfig
from tetrad.models.checkpoint.dummy import dummy_state
from tetrad.ops import backends
from tetrad.ops.backends import Backend, choose_backend
from tetrad.platforms import Platform

KIB = 1024


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("released")
    for name, document in (("flash", flash_document()), ("pro", pro_document())):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(document))
    return folder


@pytest.fixture
def inspect(tetrad) -> Any:
    def run(*arguments: object) -> dict[str, Any]:
        result = tetrad("inspect", *arguments, "--json", "--device", "cpu")
        assert result.code == 0, result.err
        return json.loads(result.out)

    return run


def test_flash(inspect, released):
    """284 billion parameters of which 13 billion are active; 357 bytes of FP4 index keys a token, 693 in FP8."""
    report = inspect(released / "flash")
    assert report["layers"] == {"swa": 2, "csa": 21, "hca": 20}
    assert report["layer_order"] == ["swa", "swa", *["csa", "hca"] * 20, "csa"]
    assert report["hca_ratio"] == 128
    assert report["parameters"]["total"] == pytest.approx(284e9, rel=0.005)
    assert report["parameters"]["active"] == pytest.approx(13e9, rel=0.03)
    experts = 43 * 256 * 3 * 4096 * 2048
    assert report["parameters"]["routed_experts"] == experts
    assert (report["dtype"], report["kv_cache_dtype"], report["index_cache_dtype"]) == ("bfloat16", "fp8", "fp4")
    caches = report["caches"]
    assert {dtype: caches[dtype]["bytes_per_token"]["index"] for dtype in caches} == {
        "fp4": 357,
        "fp8": 693,
        "bf16": 1344,
        "fp32": 2688,
    }
    assert {dtype: caches[dtype]["bytes_per_index_key"] for dtype in caches} == {
        "fp4": 68,
        "fp8": 132,
        "bf16": 256,
        "fp32": 512,
    }
    for cache in caches.values():
        token = cache["bytes_per_token"]
        assert (token["csa"], token["hca"]) == (21 * 584 / 4, 20 * 584 / 128)
        assert token["total"] == token["csa"] + token["hca"] + token["index"]
        assert {name: size / 256 for name, size in cache["block_bytes"].items()} | {"total": token["total"]} == token
    assert round(caches["fp4"]["bytes_per_token"]["total"]) == 3514
    assert round(caches["fp8"]["bytes_per_token"]["total"]) == 3850
    assert report["per_request"] == {
        "window_ring_bytes": 43 * 136 * 584,
        "compressor_ring_bytes": 21 * 2 * (64 + 16) * KIB + 20 * 136 * 4 * KIB,
    }
    assert report["index_topk"] == 512
    assert report["max_position_embeddings"] == 1 << 20


def test_pro(inspect, released):
    """1.6 trillion parameters, 49 billion active; no layer with a window alone."""
    report = inspect(released / "pro")
    assert report["layers"] == {"swa": 0, "csa": 30, "hca": 31}
    assert report["parameters"]["total"] == pytest.approx(1.6e12, rel=0.02)
    assert report["parameters"]["active"] == pytest.approx(49e9, rel=0.02)
    token = {dtype: cache["bytes_per_token"] for dtype, cache in report["caches"].items()}
    assert [token[dtype]["index"] for dtype in ("fp4", "fp8", "bf16")] == [510, 990, 1920]
    assert (token["fp4"]["csa"], round(token["fp4"]["hca"], 1)) == (4380, 141.4)
    assert report["per_request"]["compressor_ring_bytes"] == 30 * 2 * 80 * KIB + 31 * 136 * 4 * KIB


def test_parameters_are_those_of_a_checkpoint(inspect, tmp_path):
    """Counted again from real tensors: all but the tables of expert ids."""
    config = small_config()
    state = dummy_state(config)
    report = inspect(write_config(tmp_path / "m", config))
    count = sum(tensor.numel() for name, tensor in state.items() if not name.endswith("tid2eid"))
    routed = sum(tensor.numel() for name, tensor in state.items() if ".experts." in name and "shared" not in name)
    assert report["parameters"] == {
        "total": count,
        "routed_experts": routed,
        # two of four experts, and one row of the embedding
        "active": count - routed // 2 - (config.vocab_size - 1) * config.hidden_size,
    }


def test_text(tetrad, released):
    """The same for a reader: every number of the table, and one line a back end."""
    run = tetrad("inspect", released / "flash", "--device", "cpu")
    assert run.code == 0
    lines = run.out.splitlines()
    assert lines[0] == str(released / "flash")
    assert any("parameters" in line and "active per token" in line for line in lines)
    table = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("  fp", "  bf"))}
    assert table["fp4"] == ["68", "357.0", "3066.0", "91.2", "3514.2"]
    assert table["fp8"][:2] == ["132", "693.0"]
    assert "  21 CSA" in run.out
    assert "and per request 3.257 MiB of window rings and 13.91 MiB of compressor rings" in run.out
    for op in backends.BACKENDS:
        assert any(line.split()[:1] == [op] for line in lines), op


def test_a_head_that_fp4_cannot_hold(tetrad, inspect, tmp_path):
    """The row of fp4 says why, the others have their numbers; also where no layer would need them."""
    for ratios in ((0, 4, 16), (0, 16, 16)):
        folder = write_config(tmp_path / str(ratios[1]), small_config(index_head_dim=16, compress_ratios=ratios))
        report = inspect(folder)
        assert report["index_cache_dtype"] == "fp8"
        assert "index_head_dim 16 is not a multiple of 32" in report["index_cache_dtype_reason"]
        refused = report["caches"]["fp4"]["refused"]
        assert "index_head_dim 16 is not a multiple of 32" in refused
        assert "choose index_cache_dtype fp8 or bf16" in refused
        assert report["caches"]["fp8"]["bytes_per_index_key"] == 20
        assert refused in tetrad("inspect", folder, "--device", "cpu").out


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A preferred scorer that refuses this device, before the reference."""

    def supports(platform: Platform, problem: backends.Problem) -> tuple[bool, str]:
        return False, f"needs sm_90, this is {platform.arch}"

    ops = backends.BACKENDS
    first = Backend("gluon", "tetrad.ops.indexer_logits.gluon", supports)
    monkeypatch.setattr(backends, "BACKENDS", ops | {"indexer_logits": (first, *ops["indexer_logits"])})
    choose_backend.cache_clear()
    yield
    choose_backend.cache_clear()


def test_refused_back_ends_say_why(tetrad, inspect, released, picky):
    report = inspect(released / "flash")
    scorer = report["back_ends"]["indexer_logits"]
    assert scorer["refused"]["gluon"] == "needs sm_90, this is cpu"
    assert scorer["name"] == "reference"
    run = tetrad("inspect", released / "flash", "--device", "cpu")
    assert "not gluon: needs sm_90, this is cpu" in run.out


def test_options_change_the_report(inspect, released):
    """The flags of the engine count here too, and the hash follows them."""
    flash = released / "flash"
    plain = inspect(flash)
    other = inspect(flash, "--index_cache_dtype", "bf16", "--kv-cache-dtype", "bf16", "--dtype", "float32")
    assert (other["dtype"], other["kv_cache_dtype"], other["index_cache_dtype"]) == ("float32", "bf16", "bf16")
    assert other["caches"]["fp4"]["bytes_per_token"]["csa"] == 21 * 1024 / 4
    assert other["config_hash"] != plain["config_hash"]
    assert inspect(flash)["config_hash"] == plain["config_hash"]
    assert inspect(flash, "--hf-overrides", '{"index_topk": 64}')["index_topk"] == 64


@pytest.mark.parametrize(("name", "document"), [("flash", flash_document()), ("pro", pro_document())])
def test_the_released_geometries_are_in_the_package(name, document, released):
    """A description of Flash needed a download first, or a config.json found somewhere."""
    hashes = {
        EngineConfig.resolve(EngineArgs(model=model, device="cpu")).compute_hash()
        for model in (f"deepseek-v4-{name}", f"deepseek-ai/DeepSeek-V4-{name.title()}", str(released / name))
    }
    assert len(hashes) == 1
    assert json.loads((bundled.GEOMETRIES[f"deepseek-v4-{name}"] / "config.json").read_text()) == document


def test_memory_follows_the_options(inspect):
    """--max-model-len, --max-num-seqs and --kv-cache-memory-gb changed nothing of the report but a hash."""
    options = ("--max-model-len", "128K", "--max-num-seqs", "16", "--max-num-batched-tokens", "1000")
    report = inspect("deepseek-v4-flash", *options, "--kv-cache-memory-gb", "4")
    memory = report["memory"]
    block = sum(report["caches"]["fp4"]["block_bytes"].values())
    # rings of 136 keys in 43 layers, 8 pages of them for 1,000 rows; 16 tokens of CSA and 136 of HCA in fp32, with two
    # values for each channel
    page = 43 * 136 * 584
    rings = 16 * 4 * 2 * (21 * 16 * 2 * (512 + 128) + 20 * 136 * 512)
    assert (memory["window_bytes"], memory["step_bytes"]) == (16 * page, 8 * page)
    assert memory["compressor_ring_bytes"] == rings
    assert (memory["block_bytes"], memory["blocks_per_sequence"]) == (block, 512)
    fixed = 24 * page + rings
    assert memory["one_sequence_bytes"] == fixed + 512 * block
    assert memory["all_sequences_bytes"] == fixed + 16 * 512 * block
    blocks = (4 * 2**30 - fixed) // block
    assert (memory["blocks"], memory["tokens_that_fit"]) == (blocks, 256 * blocks)
    assert memory["sequences_that_fit"] == blocks // 512 == 8
    assert memory["cache_bytes"] == fixed + blocks * block <= 4 * 2**30
    assert inspect("deepseek-v4-flash", *options, "--kv-cache-memory-gb", "40")["memory"]["sequences_that_fit"] == 16
    little = inspect("deepseek-v4-flash", *options, "--kv-cache-memory-gb", "0.5")["memory"]
    assert "the caches do not fit" in little["refused"]


def test_memory_for_a_reader(tetrad, monkeypatch):
    """The bytes of weights were nowhere; what does not fit is said, and the report goes on."""
    monkeypatch.setattr("tetrad.config.memory.cpu_memory", lambda: 24 << 30)
    run = tetrad("inspect", "deepseek-v4-flash", "--device", "cpu", "--max-model-len", "128K", "--max-num-seqs", "16")
    assert run.code == 0
    assert run.out.startswith("deepseek-v4-flash\n")
    assert "held         531.3 GiB in bfloat16, 516 GiB of it routed experts" in run.out
    assert "as stored    145.3 GiB" in run.out
    assert "available    24 GiB on cpu" in run.out
    assert "not on this device: the weights do not fit" in run.out
    assert "a sequence   512 blocks of 256 tokens x 878.6 KiB = 439.3 MiB" in run.out
    assert "caches for max_model_len 131,072, max_num_seqs 16, max_num_batched_tokens 8,192" in run.out
    assert "fits         1,080,832 tokens, or 8 sequences of max_model_len, in 4 GiB" in run.out
    assert max(map(len, run.out.splitlines())) <= 100
    run = tetrad("inspect", "deepseek-v4-flash", "--device", "cpu")
    assert "the caches do not fit: 256 requests x 17.16 MiB of window and compressor rings" in " ".join(run.out.split())
    monkeypatch.setattr("tetrad.config.memory.cpu_memory", lambda: None)
    assert "available    unknown on cpu" in tetrad("inspect", "deepseek-v4-flash", "--device", "cpu").out


# ---- what the indexer chose ----

DUMMY = ("--device", "cpu", "--load-dummy", "--max-num-seqs", "2", "--max-model-len", "256")


def selection(tetrad, *arguments: object) -> dict[str, Any]:
    run = tetrad("inspect", *arguments, *DUMMY)
    assert run.code == 0, run.err
    return json.loads(run.out)


def test_selection(tetrad, ids_model):
    """Every drawn token with its query's place and as many entries as it may choose; any step equals a run of it."""
    ids = [7 + place % 200 for place in range(37)]
    text = ",".join(map(str, ids))
    report = selection(tetrad, ids_model, "--selection-token-ids", text, "--selection-tokens", "3")
    assert (report["prompt_token_ids"], report["text"]) == (ids, None)
    assert (report["index_topk"], report["tokens_per_entry"], report["index_cache_dtype"]) == (4, 4, "fp4")
    assert [step["position"] for step in report["steps"]] == [36, 37, 38]
    for step in report["steps"]:
        assert step["visible"] == 9
        assert list(step["layers"]) == ["1"]
        chosen = step["layers"]["1"]
        assert chosen == sorted(set(chosen))
        assert len(chosen) == 4
        assert all(0 <= entry < 9 for entry in chosen)
    drawn = [step["token_id"] for step in report["steps"]]
    again = selection(tetrad, ids_model, "--selection-token-ids", ",".join(map(str, [*ids, drawn[0]])))
    assert again["steps"] == report["steps"][1:2]
    everything = selection(tetrad, ids_model, "--selection-token-ids", text, "--hf-overrides", '{"index_topk": 20}')
    assert everything["steps"][0]["layers"] == {"1": list(range(9))}


def test_selection_of_text(tetrad, model):
    report = selection(tetrad, model, "--selection", "hello world", "--selection-tokens", "2")
    assert isinstance(report["text"], str)
    assert report["model"] == str(model)
    assert report["steps"][0]["position"] == len(report["prompt_token_ids"]) - 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--selection-tokens", "2"), 2, "--selection-tokens needs a prompt"),
        (("--selection-token-ids", "1,x"), 2, "not token ids, as in 5,17,3: '1,x'"),
        (("--selection-token-ids", "1,2", "--selection", "a"), 2, "not allowed with"),
        (("--selection", "a"), 1, "tokenizer"),
        (("--selection", ""), 1, "tokenizer"),
        (
            ("--selection-token-ids", "1,2", "--selection-tokens", "0"),
            2,
            "--selection-tokens must be at least 1",
        ),
        (("--selection-token-ids", "1,2", "--hf-overrides", '{"compress_ratios": [0, 0, 16]}'), 2, "has no CSA layer"),
    ],
)
def test_selections_that_cannot_be(tetrad, ids_model, arguments, code, message):
    run = tetrad("inspect", ids_model, *arguments, *DUMMY)
    assert (run.code, run.out) == (code, "")
    assert message in run.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "the folder has no config.json"),
        (b"{", "it is not valid JSON"),
        (b'\xff"', "it is not valid JSON"),
        (b'{"model_type": "deepseek_v4"}', "vocab_size: is missing"),
    ],
)
def test_a_config_that_cannot_be_read(tetrad, tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    run = tetrad("inspect", tmp_path)
    assert (run.code, run.out) == (2, "")
    assert run.err.startswith("tetrad: error: ")
    assert message in run.err


def test_a_reader_that_leaves(released):
    """``tetrad inspect ... | head``: no traceback, and no complaint of the interpreter at its end."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tetrad.cli.main", "inspect", str(released / "flash"), "--device", "cpu"]
    try:
        result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=120)
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")
