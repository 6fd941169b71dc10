"""The main model as a decoder of many sequences of one length: every head's keys and values are kept, a row a token.

Made for sampling: all sequences are equally long at all times, so there are no slots, no padding and no mask. The
plain form is one whole pass a token (`V3Model.main_states`).

Shapes: B sequences, T new tokens of each, S tokens so far, L layers, H heads, D key and V value size, d hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.training.v3.block import Block
from seqmtp_serve.training.v3.model import V3Model


class Decoder:
    """`num_sequences` sequences of at most `max_len` tokens, none yet."""

    def __init__(self, model: V3Model, num_sequences: int, max_len: int) -> None:
        config = model.config
        size = (config.num_layers, num_sequences, config.num_heads, max_len)
        self.model, self.length = model, 0
        self._keys_LBHSD = torch.empty(*size, config.query_head_dim)
        self._values_LBHSV = torch.empty(*size, config.v_head_dim)

    @torch.no_grad()
    def extend(self, tokens_BT: Tensor) -> Tensor:
        """Append T tokens to every sequence (more than one only to empty ones): states `[B, T, d]` before the norm."""
        num_sequences, num_new = tokens_BT.shape
        assert num_new == 1 or self.length == 0
        start, self.length = self.length, self.length + num_new
        rotation_XC = self.model.rotations[start : self.length].repeat(num_sequences, 1)
        hidden_Xd: Tensor = self.model.model.embed_tokens(tokens_BT.flatten())
        for index in range(self.model.config.num_layers):
            block = self.model.model.layers[index]
            assert isinstance(block, Block)
            inner_Xd = block.input_layernorm(hidden_Xd)
            mixed_Xx = self._attended(block, index, inner_Xd, rotation_XC, start)
            hidden_Xd = hidden_Xd + block.self_attn.o_proj(mixed_Xx)
            hidden_Xd = hidden_Xd + block.mlp(block.post_attention_layernorm(hidden_Xd))
        return torch.unflatten(hidden_Xd, 0, (num_sequences, num_new))

    def _attended(self, block: Block, index: int, inner_Xd: Tensor, rotation_XC: Tensor, start: int) -> Tensor:
        """Writes the new rows, then attends: `[B * T, H * V]`."""
        attention, stop = block.self_attn, self.length
        num_sequences = self._keys_LBHSD.shape[1]

        def by_sequence(x_XHD: Tensor) -> Tensor:
            return torch.unflatten(x_XHD, 0, (num_sequences, -1)).transpose(1, 2)

        new_keys, new_values = attention.keys_values(inner_Xd, rotation_XC)
        keys_BHSD, values_BHSV = self._keys_LBHSD[index], self._values_LBHSV[index]
        keys_BHSD[:, :, start:stop], values_BHSV[:, :, start:stop] = by_sequence(new_keys), by_sequence(new_values)
        q_BHTD = by_sequence(attention.queries(inner_Xd, rotation_XC))
        if start == 0:
            mixed_BHTV = F.scaled_dot_product_attention(
                q_BHTD, keys_BHSD[:, :, :stop], values_BHSV[:, :, :stop], is_causal=True, scale=attention.scale
            )
        else:  # by hand: torch's own form for unequal key and value sizes scales a copy of all keys
            scores_BHTS = (q_BHTD * attention.scale) @ keys_BHSD[:, :, :stop].transpose(-1, -2)
            mixed_BHTV = torch.softmax(scores_BHTS, -1) @ values_BHSV[:, :, :stop]
        return mixed_BHTV.transpose(1, 2).flatten(2).flatten(0, 1)
