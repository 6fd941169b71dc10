"""The main model's own continuations of prompts, many at a time, with the state of every token kept.

The plain form is one whole pass a token (`plain_reply`).

Shapes: B sequences, T tokens of each, V vocabulary, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from seqmtp_serve.training.joint.corpus import Corpus
from seqmtp_serve.training.packing import main_tensors, pack
from seqmtp_serve.training.rollout import is_looping
from seqmtp_serve.training.v3.decoder import Decoder
from seqmtp_serve.training.v3.model import V3Model

ChooseNext = Callable[[Tensor, int], Tensor]  # logits [B, V], position of the token chosen -> ids [B]
EOS = 1  # of every corpus made here, see `stdlib_corpus.SPECIAL`


def best_next(logits_BV: Tensor, position: int) -> Tensor:
    """Greedy; ties go to the lower id."""
    return logits_BV.argmax(-1)


def places(corpus: Corpus, length: int, stride: int) -> list[tuple[int, int]]:
    """Every `(document, at)` that a prompt of `length` can be cut at with a token after it, `stride` tokens apart."""
    sizes = corpus.starts.diff().tolist()
    return [(index, at) for index, size in enumerate(sizes) for at in range(0, size - length, stride)]


def prompt_at(corpus: Corpus, place: tuple[int, int], length: int) -> list[int]:
    """The document's first token, then its tokens from `at + 1` on: as served, where prompts open with `<bos>`."""
    index, at = place
    document = corpus.document(index)
    return [document[0], *document[at + 1 : at + length]]


@torch.no_grad()
def continued(
    model: V3Model, prompts: Sequence[Sequence[int]], choose: ChooseNext, *, reply_len: int, stop_loops: bool
) -> list[tuple[Tensor, Tensor]]:
    """`(tokens [n], states [n, d])` of each prompt (all of one length) and its reply; the last state is zero.

    A reply ends with `<eos>`, after `reply_len` tokens or, if asked, once it only repeats itself.
    """
    prompt_len = len(prompts[0])
    decoder = Decoder(model, len(prompts), prompt_len + reply_len)
    tokens_BT = torch.tensor(list(prompts))
    states = [decoder.extend(tokens_BT)]
    for position in range(prompt_len, prompt_len + reply_len):
        chosen_B = choose(model.logits(states[-1][:, -1]), position)
        tokens_BT = torch.cat((tokens_BT, chosen_B[:, None]), 1)
        if position + 1 < prompt_len + reply_len:
            states.append(decoder.extend(chosen_B[:, None]))
    state_BTd = torch.cat((*states, torch.zeros_like(states[-1][:, :1])), 1)
    found = []
    for row, text in enumerate(tokens_BT.tolist()):
        stop = prompt_len + kept_len(text[prompt_len:], stop_loops=stop_loops)
        found.append((tokens_BT[row, :stop], state_BTd[row, :stop]))
    return found


def kept_len(reply: Sequence[int], *, stop_loops: bool) -> int:
    """Tokens up to and with the first `<eos>`, and no more than the loop test lets through."""
    stop = reply.index(EOS) + 1 if EOS in reply else len(reply)
    if stop_loops:
        return next((at for at in range(1, stop + 1) if is_looping(list(reply[:at]))), stop)
    return stop


def plain_reply(model: V3Model, prompt: Sequence[int], choose: ChooseNext, reply_len: int) -> list[int]:
    """`reply_len` tokens of the main model, one whole pass each: the oracle of `continued`."""
    text = list(prompt)
    for position in range(len(text), len(text) + reply_len):
        state_Td = model.main_states(main_tensors(pack([text])))
        text.append(int(choose(model.logits(state_Td[-1:]), position)[0]))
    return text[len(prompt) :]
