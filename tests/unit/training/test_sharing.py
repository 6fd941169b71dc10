"""Three ways to hold the main model's embedding, norm and head, which equal values do not tell apart."""

from __future__ import annotations

import pytest
import torch
from tiny_v3 import CONFIG, random_documents, tiny_v3
from torch import nn

from seqmtp_serve.errors import SharingBroken
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.training.joint_terms import joint_terms
from seqmtp_serve.training.loss_weight import LossWeightSchedule
from seqmtp_serve.training.mtp_objective import ObjectiveContract, counts_of, objective
from seqmtp_serve.training.packing import compile_stream, pack
from seqmtp_serve.training.ranks import Alone
from seqmtp_serve.training.sharing import (
    Replica,
    Sharing,
    bytes_saved,
    head_parameters_saved,
    require_aliases,
    require_one_slot_each,
    shared_pairs,
    sharing_of,
    storage_id,
    synchronise,
)
from seqmtp_serve.training.v3.model import V3Model
from seqmtp_serve.training.v3.products import FAST, RowLinear

CONTRACT = ObjectiveContract(schedule=LossWeightSchedule(phases=((0, 0.3),)))


def with_a_copied_head(model: V3Model) -> Replica:
    """Give module 1 a head of its own with equal values."""
    copy = RowLinear(CONFIG.hidden_size, CONFIG.vocab_size, FAST)
    with torch.no_grad():
        copy.weight.copy_(model.lm_head.weight)
    model.mtp_layer(1).shared_head.head = copy
    return Replica(owner=model.lm_head.weight, copy=copy.weight)


def one_step(model: V3Model, replicas: list[Replica]) -> None:
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=0.01)
    stream = compile_stream(pack(random_documents([8, 5])), 1)
    main, depths = joint_terms(model, stream, CONTRACT)
    objective(main, depths, counts_of([stream], Alone()), CONTRACT, 0.3).backward()
    synchronise(replicas)
    optimizer.step()


@pytest.mark.covers(48, 49, 141)
def test_shared_tensors_are_one_memory() -> None:
    model = tiny_v3(2)
    require_aliases(model)
    pairs = shared_pairs(model)
    assert len(pairs) == 6  # embedding, norm and head of two modules
    for name, (owner, other) in pairs.items():
        assert storage_id(owner) == storage_id(other), name
        assert owner is other
    own_norm = V3Model(CONFIG, MtpConfig(final_norm_owner="mtp"))
    assert set(shared_pairs(own_norm)) == {
        "model.layers.2.embed_tokens.weight",
        "model.layers.2.shared_head.head.weight",
    }


@pytest.mark.covers(48, 49, 141)
def test_each_shared_tensor_has_one_optimizer_slot() -> None:
    model = tiny_v3(2)
    optimizer = torch.optim.AdamW(model.parameters())
    require_one_slot_each(model, optimizer)
    names = model.state_dict().keys()
    assert len({id(p) for p in model.parameters()}) == len(list(model.parameters()))
    assert len(names) == len(list(model.parameters())) + 6 + 3  # six aliases, three gate biases


@pytest.mark.covers(48, 115)
def test_an_alias_after_the_optimizer_is_seen() -> None:
    model = tiny_v3(1)
    replica = with_a_copied_head(model)
    optimizer = torch.optim.AdamW(model.parameters())  # has slots for both
    model.mtp_layer(1).shared_head.head = model.lm_head  # aliased too late
    require_aliases(model)
    assert any(p is replica.copy for group in optimizer.param_groups for p in group["params"])
    with pytest.raises(SharingBroken, match="holds 1 tensors the model does not use"):
        require_one_slot_each(model, optimizer)


@pytest.mark.covers(48)
def test_a_tensor_held_twice_or_not_at_all_is_seen() -> None:
    model = tiny_v3(1)
    everything = list(model.parameters())
    twin = nn.Parameter(model.lm_head.weight.data)  # another object, the same memory
    with pytest.raises(SharingBroken, match="holds one tensor twice"):
        require_one_slot_each(model, torch.optim.AdamW([*everything, twin]))
    with pytest.raises(SharingBroken, match="the optimizer lacks lm_head"):
        require_one_slot_each(model, torch.optim.AdamW([p for p in everything if p is not model.lm_head.weight]))


@pytest.mark.covers(47, 50, 52, 114)
def test_the_three_ways_to_share_after_one_step() -> None:
    aliased, synchronised, independent = tiny_v3(1), tiny_v3(1), tiny_v3(1)
    replica, loose = with_a_copied_head(synchronised), with_a_copied_head(independent)
    assert torch.equal(replica.owner, replica.copy)  # equal values, as in a state_dict
    assert torch.equal(loose.owner, loose.copy)
    kinds = [
        sharing_of(aliased.lm_head.weight, aliased.mtp_layer(1).shared_head.head.weight, [replica]),
        sharing_of(replica.owner, replica.copy, [replica]),
        sharing_of(loose.owner, loose.copy, [replica]),
    ]
    assert kinds == [Sharing.PHYSICAL_ALIAS, Sharing.REPLICATED_SYNCHRONISED, Sharing.INDEPENDENT_COPIES]
    one_step(aliased, [])
    one_step(synchronised, [replica])
    one_step(independent, [])
    assert torch.equal(replica.owner, replica.copy)
    torch.testing.assert_close(replica.owner, aliased.lm_head.weight, rtol=1e-4, atol=1e-5)
    assert not torch.equal(loose.owner, loose.copy)
    assert not torch.allclose(loose.owner, aliased.lm_head.weight, rtol=1e-3)


@pytest.mark.covers(49, 114, 141)
@pytest.mark.parametrize("part", ["head", "embedding", "norm"])
def test_a_copy_is_refused_before_training(part: str) -> None:
    model = tiny_v3(1)
    layer = model.mtp_layer(1)
    if part == "head":
        with_a_copied_head(model)
    elif part == "embedding":
        layer.embed_tokens = nn.Embedding.from_pretrained(model.model.embed_tokens.weight.clone(), freeze=False)
    else:
        layer.shared_head.norm = type(model.model.norm)(CONFIG.hidden_size, CONFIG.rms_eps)
    with pytest.raises(SharingBroken, match=rf"{part if part != 'embedding' else 'embed_tokens'}.weight: independent"):
        require_aliases(model)


@pytest.mark.covers(49, 161)
def test_what_sharing_saves_is_counted_only_where_it_is_shared() -> None:
    model = tiny_v3(1)
    name = "model.layers.2.shared_head.head.weight"
    assert bytes_saved(model)[name] == CONFIG.vocab_size * CONFIG.hidden_size * 4
    with_a_copied_head(model)
    assert bytes_saved(model)[name] == 0
    assert head_parameters_saved(129_280, 7168, 1) == 926_679_040
