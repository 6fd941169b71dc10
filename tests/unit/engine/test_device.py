"""Engines on a device that is no CPU: the same text, no tensor left behind, one transfer for a step's outcome.

The pretended device (`tests/unit/pretend_device.py`) computes with the CPU's own kernels, so its texts are the CPU's; a
real one has other kernels, whose last bits differ, so there the choices must be the same, and log-probabilities close.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from seqmtp_serve.config import EngineConfig, Kernels
from seqmtp_serve.engine.direct import DirectProposer
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.errors import InternalError, InvalidField
from seqmtp_serve.model import deepseek, layers
from seqmtp_serve.model.config import LlamaConfig, MtpConfig
from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.model.device import usable_device
from seqmtp_serve.model.synthetic import TINY, TINY_V3, mtp_tensors, target_tensors
from seqmtp_serve.request import Request, Shaping
from seqmtp_serve.speculation.row_params import RowParams
from tests.unit.devices import DEVICES, HAS_CUDA, using
from tests.unit.engine.driver import Driver, Stream
from tests.unit.engine.engines import config, request, seeded
from tests.unit.pretend_device import Mixed, pretending

MODELS: dict[str, LlamaConfig | DeepseekConfig] = {"llama": TINY, "deepseek": TINY_V3}
TARGETS = {name: target_tensors(model) for name, model in MODELS.items()}
MODULES = {
    name: mtp_tensors(TARGETS[name], model, num_modules=2, draft_vocab_size=80) for name, model in MODELS.items()
}
FAST = {"numerics": "fast"}
SHAPING = Shaping(
    repetition_penalty=1.3, presence_penalty=0.4, logit_bias=((5, 2.0), (9, -3.0)), bad_words=((4,), (7, 8))
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its proposer."""

    target: TargetEngine
    proposer: ProposerEngine

    def run(self, *requests: Request, depth: int = 3) -> list[Stream]:
        return Driver(self.target, depth=depth, chunk=9).run(*requests)


def engines(name: str, device: str, **fields: Any) -> Pair:
    settings = config(**FAST | {"device": device} | fields)
    module = ProposerEngine(settings, MODELS[name], MtpConfig(num_modules=2), MODULES[name])
    return Pair(TargetEngine(settings, MODELS[name], TARGETS[name], DirectProposer(module)), module)


def mixed_requests() -> list[Request]:
    """Each contract, filters, logprobs, shaping and a ban, side by side."""
    shaped = seeded(4)
    return [
        request(0, logprobs=2, prompt_logprobs=1),
        seeded(1),
        request(2, temperature=0.9, seed=5, top_k=20, min_p=0.01),  # ratio
        seeded(3, min_tokens=9),
        replace(shaped, params=replace(shaped.params, shaping=SHAPING)),
    ]


def logprobs(stream: Stream) -> list[float]:
    chosen = [each for row in stream.rows for each in row.logprobs]
    return [each.logprob for each in [*stream.prompt_logprobs, *chosen]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_the_text_is_that_of_the_cpu(name: str, device: str) -> None:
    expected = engines(name, "cpu").run(*mixed_requests())
    with using(device) as place:
        found = engines(name, place).run(*mixed_requests())
    assert [stream.output for stream in found] == [stream.output for stream in expected]
    assert logprobs(found[0]) == pytest.approx(logprobs(expected[0]), abs=1e-3)
    assert sum(row.accepted for stream in found for row in stream.rows) > 10


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_products_change_little(device: str) -> None:
    """The first token's log-probability, of a whole prompt in half precision products and of single ones."""
    requests = [request(0, logprobs=1, prompt_logprobs=1, max_tokens=1)]
    expected = logprobs(engines("deepseek", "cpu").run(*requests)[0])
    with using(device) as place:
        found = logprobs(engines("deepseek", place, weights="bf16").run(*requests)[0])
    assert found == pytest.approx(expected, abs=0.15)
    assert found != expected, "the products were really rounded"


@pytest.mark.parametrize("device", DEVICES)
def test_logits_that_are_not_finite_end_their_request_alone(device: str) -> None:
    with using(device) as place:
        pair = engines("llama", place)
        streams = [Stream.open(request(0)), Stream.open(seeded(1))]
        driver = Driver(pair.target)
        for _ in range(3):
            driver.step(streams)
        (spoilt,) = [pair.target._sequences["r0"]]
        page = pair.target.cache.pool.pages(spoilt.lease)[0]
        pair.target.cache.kv_LSE[:, page * 8] = math.nan
        driver.step(streams)
        assert [(row.ref.request_id, row.error) for row in driver.refused] == [("r0", InternalError.code)]
        driver.refused.clear()
        driver.resume([streams[1]])
    assert streams[1].output == engines("llama", "cpu").run(seeded(1))[0].output


# ---- what crosses


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"temperature": 0.8, "seeded": True, "top_p": 0.9}])
def test_a_round_brings_its_outcome_to_the_host_in_one_transfer(name: str, sampling: dict[str, Any]) -> None:
    """Greedy, ratio and coupled: one transfer for the tokens of all requests at all depths. Drafting makes one for each
    draft, and another under `ratio`, whose distribution travels. The experts touched come once for each module."""
    kernels = Kernels(experts="torch-grouped") if name == "deepseek" else Kernels()
    dtype = "fp32" if name == "llama" else "bf16"
    with pretending() as traffic:
        pair = engines(name, "cuda", weights=dtype, kernels=kernels)
        streams = [Stream.open(request(index, max_tokens=60, **sampling)) for index in range(3)]
        driver = Driver(pair.target)
        for _ in range(3):
            driver.step(streams)
        traffic.clear()
        driver.step(streams)
    counted = 3 if name == "deepseek" else 0
    drafts = 3 * (2 if sampling == {"temperature": 0.7} else 1)
    assert sum(traffic.to_host.values()) == 1 + drafts + counted, traffic.to_host


def test_without_drafts_a_step_of_a_dense_model_is_one_transfer() -> None:
    with pretending() as traffic:
        target = TargetEngine(config(device="cuda", **FAST), TINY, TARGETS["llama"], None)
        driver, streams = Driver(target, depth=0), [Stream.open(request(index)) for index in range(3)]
        for _ in range(2):
            driver.step(streams)
        traffic.clear()
        driver.step(streams)
    assert sum(traffic.to_host.values()) == 1


# ---- the test of the tests: a tensor left on the CPU is noticed, whichever it is


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu()


def leave(path: str) -> Callable[[Pair], None]:
    """Bring one attribute back to the CPU: `a.b.0.c`."""

    def plant(pair: Pair) -> None:
        *steps, last = path.split(".")
        node: Any = pair
        for step in steps:
            node = node[int(step)] if step.isdecimal() else getattr(node, step)
        setattr(node, last, on_cpu(getattr(node, last)))

    return plant


PLANTS = {
    "llama": (
        "target._trunk._embed_Vd",
        "target._trunk._layers._rotations",
        "target._trunk._norm._gain_d",
        "target._trunk._head._weight_OI",
        "target._trunk._blocks.0._qkv._weight_OI",
        "target._cache.kv_LSE",
        "target._cache.hidden_Sd",
        "proposer._cache.kv_LSE",
        "proposer._modules.0._fuse._weight_OI",
        "proposer._modules.1._enorm._gain_d",
        "proposer._modules.1._layers._rotations",
        "proposer._modules.0.draft_token_ids",
    ),
    "deepseek": (
        "target._trunk._layers._rotations",
        "target._trunk._blocks.1._mlp._gate._bias_E",
        "target._trunk._blocks.1._mlp._experts._ids",
        "target._trunk._blocks.0._attention._expand_values._weight_HIO",
        "target._cache.kv_LSE",
        "proposer._modules.0._block._mlp._experts._ids",
    ),
}


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, paths in PLANTS.items() for path in paths])
def test_a_tensor_left_on_the_cpu_is_noticed(name: str, path: str) -> None:
    with pretending():
        pair = engines(name, "cuda")
        leave(path)(pair)
        with pytest.raises(Mixed):
            pair.run(request(0), seeded(1))


def test_indices_and_sampler_state_left_on_the_cpu_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    of_requests, plan_attention, plan_mla = RowParams.of_requests, layers.plan_attention, deepseek.plan_mla
    with monkeypatch.context() as patch, pretending():
        patch.setattr(RowParams, "of_requests", lambda requests, device: of_requests(requests))
        with pytest.raises(Mixed):
            engines("llama", "cuda").run(seeded(0))
    for name in ("write_slot_N", "pack_index_X", "unpack_index", "queries_XD"):
        with monkeypatch.context() as patch, pretending():
            patch.setattr(layers, "plan_attention", leaving(plan_attention, name))
            with pytest.raises(Mixed):
                engines("llama", "cuda").run(request(0))
    for name in ("rotation_N1C", "write_slot_N"):
        with monkeypatch.context() as patch, pretending():
            patch.setattr(deepseek, "plan_mla", leaving(plan_mla, name))
            with pytest.raises(Mixed):
                engines("deepseek", "cuda").run(request(0))


def leaving(plan: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The plan with one of its tensors on the CPU."""

    def planned(*args: Any) -> Any:
        found = plan(*args)
        return replace(found, **{name: on_cpu(getattr(found, name))})

    return planned


# ---- devices and what they refuse


def test_a_device_that_is_not_here_is_refused_with_what_to_do() -> None:
    assert usable_device("cpu") == torch.device("cpu")
    with pytest.raises(InvalidField, match="not cpu, cuda or cuda:N"):
        usable_device("tpu")
    with pretending(count=2):
        assert usable_device("cuda") == torch.device("cuda", 0)
        assert usable_device("cuda:1") == torch.device("cuda", 1)
        with pytest.raises(InvalidField, match="this process sees cuda:0, cuda:1 ") as refused:
            usable_device("cuda:2")
    assert refused.value.param == "engine.device"


@pytest.mark.skipif(HAS_CUDA, reason="this machine has a CUDA device")
def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidField, match=r"without CUDA; install|finds no device"):
        TargetEngine(config(device="cuda", **FAST), TINY, TARGETS["llama"], None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(InvalidField, match="finds no device it can use: see what `nvidia-smi` says"):
        usable_device("cuda:0")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"device": "cuda"}, "on cuda set weights to bf16 or fp32 .* and numerics to fast"),
        ({"device": "cuda:1", "weights": "fp32"}, "on cuda:1 set numerics to fast"),
        ({"device": "cuda", "numerics": "fast"}, "on cuda set weights to bf16 or fp32"),
        ({"weights": "bf16"}, "on cpu set numerics to fast"),
    ],
)
def test_what_a_device_cannot_do_is_refused_all_at_once(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidField, match=says) as refused:
        EngineConfig(**fields)
    assert refused.value.param == "engine.device"
