"""The module's masked, batched steps equal a plain rollout with a growing cache."""

from __future__ import annotations

import pytest
import torch
from plain_rollout import plain_chain

from seqmtp_serve.model.config import LlamaConfig
from seqmtp_serve.training.mtp_module import MtpModule, module_from_last_layer

ROWS, DEPTH = 9, 4


def chains(module: MtpModule, hidden: torch.Tensor, embed: torch.Tensor, starts: torch.Tensor) -> list[torch.Tensor]:
    fed, rows = module.first_step(hidden[:, :ROWS], embed[:, :ROWS], starts)
    outputs = [fed]
    docs = torch.arange(len(hidden))[:, None]
    for step in range(2, DEPTH + 1):
        fed = module.next_step(fed, embed[docs, starts + step - 1], starts, rows)
        outputs.append(fed)
    return outputs


@pytest.fixture
def inputs(shape: LlamaConfig) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    size = (2, ROWS + DEPTH, shape.hidden_size)
    return torch.randn(size, generator=random), torch.randn(size, generator=random)


@pytest.mark.covers(15, 16, 18, 19, 92, 93)
def test_every_step_equals_the_plain_rollout(module: MtpModule, inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    hidden, embed = inputs
    starts = torch.tensor([[0, 3, 8], [1, 5, 7]])
    with torch.no_grad():
        outputs = chains(module, hidden, embed, starts)
        for doc in range(2):
            for column, start in enumerate(starts[doc].tolist()):
                expected = plain_chain(module, hidden[doc], embed[doc], start, DEPTH)
                for step in range(DEPTH):
                    torch.testing.assert_close(outputs[step][doc, column], expected[step], rtol=2e-4, atol=2e-4)


@pytest.mark.covers(21, 22)
def test_a_row_sees_nothing_newer_than_its_own_inputs(
    module: MtpModule, inputs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    hidden, embed = (x.clone() for x in inputs)
    starts = torch.tensor([[4], [4]])
    with torch.no_grad():
        before = chains(module, hidden, embed, starts)
        hidden[:, 5:] += 1  # the chain of base 4 gets the trunk's state up to base 4 only
        embed[:, 4 + DEPTH :] += 1
        after = chains(module, hidden, embed, starts)
        for step in range(DEPTH):
            assert torch.equal(before[step], after[step])
        embed[:, 5] += 1  # x_6: the second step's own input
        changed = chains(module, hidden, embed, starts)
    assert torch.equal(before[0], changed[0])
    assert all(not torch.allclose(before[step], changed[step]) for step in range(1, DEPTH))


@pytest.mark.covers(20)
def test_fusion_adds_two_d_squared_parameters(module: MtpModule, shape: LlamaConfig) -> None:
    assert module.eh_proj.weight.numel() == 2 * shape.hidden_size**2
    assert module.eh_proj.bias is None


def test_the_start_is_the_last_layer_on_the_hidden_row(
    shape: LlamaConfig, tensors: dict[str, torch.Tensor], inputs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    module = module_from_last_layer(shape, tensors)
    last = f"model.layers.{shape.num_layers - 1}."
    assert torch.equal(module.mlp.down_proj.weight, tensors[last + "mlp.down_proj.weight"])
    hidden, embed = inputs
    bases = torch.arange(ROWS)[None].expand(2, -1)
    with torch.no_grad():
        first, _ = module.first_step(hidden[:, :ROWS], embed[:, :ROWS], bases)
        other, _ = module.first_step(hidden[:, :ROWS], -embed[:, :ROWS], bases)
    assert torch.equal(first, other)  # [0 | I]: the embedding does not count yet
