"""The packed streams of an epoch, in an order fixed by (seed, epoch): a resumed run reads the very next one.

Documents are cut into windows; a window is a segment of its own, with positions from zero. Windows in shuffled order go
each into the oldest stream that is still open and has room; what is left at a stream's end is padding.
"""

from __future__ import annotations

import random

from seqmtp_serve.training.joint.corpus import Corpus
from seqmtp_serve.training.packing import PackedStream, pack

_OPEN = 64  # streams that still take windows


def epoch_streams(corpus: Corpus, *, window: int, stream_len: int, seed: int, epoch: int) -> list[list[list[int]]]:
    """The windows of each stream. Every token of the corpus is in exactly one."""
    windows = [
        document[at : at + window]
        for document in map(corpus.document, range(len(corpus)))
        for at in range(0, len(document), window)
    ]
    random.Random(f"streams/{seed}/{epoch}").shuffle(windows)
    streams: list[list[list[int]]] = []
    open_ones: list[tuple[int, int]] = []  # (stream, room), oldest first
    for tokens in windows:
        fits = next((at for at, (_, room) in enumerate(open_ones) if room >= len(tokens)), None)
        if fits is None:
            streams.append([])
            open_ones = [*open_ones[-_OPEN + 1 :], (len(streams) - 1, stream_len)]
            fits = len(open_ones) - 1
        stream, room = open_ones[fits]
        streams[stream].append(tokens)
        open_ones[fits] = (stream, room - len(tokens))
    return streams


def packed(windows: list[list[int]], stream_len: int) -> PackedStream:
    """One stream of `epoch_streams` as rows."""
    return pack(windows, length=stream_len)


def share_of(rank: int, ranks: int, step_streams: list[list[list[int]]]) -> list[list[list[int]]]:
    """The streams of a step that `rank` reads: an equal, contiguous share. Raises ValueError when it is not equal."""
    if len(step_streams) % ranks:
        raise ValueError(f"{len(step_streams)} streams a step cannot be shared out evenly over {ranks} ranks")
    share = len(step_streams) // ranks
    return step_streams[rank * share : (rank + 1) * share]
