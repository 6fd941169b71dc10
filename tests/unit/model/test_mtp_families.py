"""The family table: what each family's module declares."""

from __future__ import annotations

from seqmtp_serve.checkpoint import names
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.mtp_families import FAMILIES


def test_released_modules_are_fed_and_recycled_after_the_norm_and_bring_their_own() -> None:
    for name in ("deepseek_v3", "glm4_moe"):
        contract = FAMILIES[name].contract
        assert (contract.fusion_order, contract.norm_flavour) == ("eh", "w")
        assert (contract.fed_hidden, contract.recycled_hidden) == ("post", "post")
        assert (contract.final_norm_owner, contract.zero_position0) == ("mtp", False)
        assert FAMILIES[name].final_norm == "shared_head.norm.weight"


def test_own_modules_are_fed_before_the_norm_and_use_the_main_one() -> None:
    assert FAMILIES["seqmtp"].contract == MtpConfig()
    assert FAMILIES["seqmtp"].final_norm == ""


def test_every_family_that_brings_no_norm_uses_the_main_one() -> None:
    for family in FAMILIES.values():
        assert (family.contract.final_norm_owner == "mtp") == bool(family.final_norm)
        assert family.prefix.format(layer=61) == "model.layers.61."


def test_the_families_keep_their_modules_under_the_released_names() -> None:
    """The names that gates and engine know: a family with others needs a translation first."""
    for family in FAMILIES.values():
        assert (family.embedding_norm, family.hidden_norm, family.fusion) == (names.ENORM, names.HNORM, names.EH_PROJ)
        assert family.final_norm in ("", names.SHARED_NORM)
        assert family.prefix.format(layer=3) == names.layer_prefix(3)
