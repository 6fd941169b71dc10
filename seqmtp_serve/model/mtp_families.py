"""What released MTP modules consume and return, family by family: the things no tensor shape reveals.

Read from the runtimes that serve them (vLLM 0.32 `model_executor/models/*_mtp.py`, SGLang 0.5.23 `models/*_nextn.py`,
transformers 5.24 `modeling_layers.MtpModel`); where they disagree the row follows transformers and SGLang:

* position 0: vLLM zeroes the embedding of the base-0 row of DeepSeek and GLM modules, the other two do not;
* recycled row: vLLM recycles GLM's row before its norm, the other two after it.

A row of this table is a starting point for a checkpoint that declares nothing; a manifest overrides it.
"""

from __future__ import annotations

from dataclasses import dataclass

from seqmtp_serve.model.config import MtpConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpFamily:
    """Where a family keeps its module, and the contract the module was trained for.

    `names` are tensor names below `prefix` (`{layer}` is main layers + module index); the block's own names are the
    main layers'. A `final_norm` of "" means that the module brings none.
    """

    prefix: str
    embedding_norm: str
    hidden_norm: str
    fusion: str
    final_norm: str
    contract: MtpConfig


_RELEASED = MtpConfig(fusion_order="eh", fed_hidden="post", recycled_hidden="post", final_norm_owner="mtp")
_PREFIX = "model.layers.{layer}."

FAMILIES = {
    # DeepSeek-V3, R1 and V3.1: one module, layer 61, its own shared_head.norm; embedding and head are stored again.
    "deepseek_v3": MtpFamily(
        prefix=_PREFIX,
        embedding_norm="enorm.weight",
        hidden_norm="hnorm.weight",
        fusion="eh_proj.weight",
        final_norm="shared_head.norm.weight",
        contract=_RELEASED,
    ),
    # GLM-4.5, 4.6 and 4.7 (layer 92; 46 for Air): the same layout and contract around another block.
    "glm4_moe": MtpFamily(
        prefix=_PREFIX,
        embedding_norm="enorm.weight",
        hidden_norm="hnorm.weight",
        fusion="eh_proj.weight",
        final_norm="shared_head.norm.weight",
        contract=_RELEASED,
    ),
    # Modules trained here: fed and recycled before the norm, and the main model's own norm before the head.
    "seqmtp": MtpFamily(
        prefix=_PREFIX,
        embedding_norm="enorm.weight",
        hidden_norm="hnorm.weight",
        fusion="eh_proj.weight",
        final_norm="",
        contract=MtpConfig(),
    ),
}
