"""How the MTP layers hold the main model's embedding, final norm and head: three ways that one state_dict hides.

    physical alias              one tensor, one gradient, one optimizer slot: what training here requires
    replicated, synchronised    two tensors; their gradients are summed into both before every step. For a pipeline
                                whose first and last stage cannot share memory. Saves nothing
    independent copies          two tensors that start equal and drift apart: a fault

Equal values prove nothing, so the checks look at storage, at the optimizer's slots and at declared replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

from seqmtp_serve.errors import SharingBroken
from seqmtp_serve.training.v3.block import MtpLayer
from seqmtp_serve.training.v3.model import V3Model


class Sharing(StrEnum):
    PHYSICAL_ALIAS = "physical_alias"
    REPLICATED_SYNCHRONISED = "replicated_synchronised"
    INDEPENDENT_COPIES = "independent_copies"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A copy of `owner` whose gradient is kept equal to the owner's by `synchronise`."""

    owner: nn.Parameter
    copy: nn.Parameter


def storage_id(tensor: Tensor) -> int:
    """Equal exactly where two tensors are the same memory."""
    return tensor.untyped_storage().data_ptr()


def shared_pairs(model: V3Model) -> dict[str, tuple[Tensor, Tensor]]:
    """Name in the MTP layer -> (main model's tensor, MTP layer's tensor), for every tensor meant to be shared."""
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in model.model.layers.named_children():
        if not isinstance(layer, MtpLayer):
            continue
        prefix = f"model.layers.{name}."
        pairs[f"{prefix}embed_tokens.weight"] = (model.model.embed_tokens.weight, layer.embed_tokens.weight)
        pairs[f"{prefix}shared_head.head.weight"] = (model.lm_head.weight, layer.shared_head.head.weight)
        if model.mtp.final_norm_owner == "main":
            pairs[f"{prefix}shared_head.norm.weight"] = (model.model.norm.weight, layer.shared_head.norm.weight)
    return pairs


def sharing_of(owner: Tensor, other: Tensor, replicas: Iterable[Replica] = ()) -> Sharing:
    """Which of the three it is; `replicas` are those a run synchronises."""
    if storage_id(owner) == storage_id(other):
        return Sharing.PHYSICAL_ALIAS
    if any(replica.owner is owner and replica.copy is other for replica in replicas):
        return Sharing.REPLICATED_SYNCHRONISED
    return Sharing.INDEPENDENT_COPIES


def require_aliases(model: V3Model) -> None:
    """Raises SharingBroken naming the first shared tensor that is not the main model's own memory."""
    for name, (owner, other) in shared_pairs(model).items():
        if (kind := sharing_of(owner, other)) is not Sharing.PHYSICAL_ALIAS:
            raise SharingBroken(f"{name}: {kind}, but training needs the main model's own tensor; alias it first")


def require_one_slot_each(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises SharingBroken unless the optimizer holds exactly the model's parameters, each memory once.

    An optimizer built before the aliases still holds (and keeps moments for) tensors the model no longer has.
    """
    held = [storage_id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    wanted = {storage_id(parameter): name for name, parameter in model.named_parameters()}
    if len(held) != len(set(held)):
        raise SharingBroken("the optimizer holds one tensor twice: build it from unique parameters")
    if stray := set(held) - wanted.keys():
        raise SharingBroken(
            f"the optimizer holds {len(stray)} tensors the model does not use: alias before building it"
        )
    if missing := wanted.keys() - set(held):
        raise SharingBroken(f"the optimizer lacks {wanted[missing.pop()]}")


def synchronise(replicas: Iterable[Replica]) -> None:
    """Give owner and copy the sum of both gradients. Once a step, after the backward pass and before the optimizer."""
    for replica in replicas:
        total = (_gradient(replica.owner) + _gradient(replica.copy)).detach()
        replica.owner.grad, replica.copy.grad = total, total.clone()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def bytes_saved(model: V3Model) -> Mapping[str, int]:
    """Bytes each alias saves against a copy of its own; 0 where there is a copy. A replica may not claim any."""
    return {
        name: owner.numel() * owner.element_size() if storage_id(owner) == storage_id(other) else 0
        for name, (owner, other) in shared_pairs(model).items()
    }


def head_parameters_saved(vocab_size: int, hidden_size: int, modules: int) -> int:
    """Parameters that sharing a vocabulary head saves: V * d a module."""
    return vocab_size * hidden_size * modules
