"""What each sub-command of ``seqmtp fit`` does, from parsed arguments to files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.training import tasks
from seqmtp_serve.training.acceptance import Acceptance, measure, total
from seqmtp_serve.training.benchmark_text import own_replies
from seqmtp_serve.training.chat import REPLY_OPENS, USER_OPENS, encoder
from seqmtp_serve.training.collect import collect
from seqmtp_serve.training.compute_dtype import faster_dtype
from seqmtp_serve.training.export import keep_start_record
from seqmtp_serve.training.loss import Frozen
from seqmtp_serve.training.mtp_module import MtpModule, module_from_last_layer
from seqmtp_serve.training.passages import passages_of
from seqmtp_serve.training.sampled_acceptance import Sampling, measure_sampled
from seqmtp_serve.training.shards import Document, write_shards
from seqmtp_serve.training.target import FrozenTarget
from seqmtp_serve.training.texts import read_texts, with_rows, write_texts
from seqmtp_serve.training.trainer import FitSettings, Trainer, is_held_out, load_documents
from seqmtp_serve.training.vocabulary import count_reply_tokens, coverage, rank_tokens

_HELD_OUT_DOCUMENTS = 120


def rollout(args: argparse.Namespace) -> None:
    """Sample shards into ``--out``."""
    checkpoint = open_checkpoint(args.target)
    encode = encoder(checkpoint)
    around = len(encode(USER_OPENS)), len(encode(REPLY_OPENS))
    if args.kind == "self":
        stream = tasks.self_written(args.seed, args.max_reply)
    elif args.kind == "grid":
        stream = tasks.from_grid(args.seed, args.max_reply, encode)
    elif args.kind == "article":
        stream = tasks.articles(args.seed, args.max_reply, encode, args.max_len - args.max_reply - sum(around))
    else:
        names = tuple(sorted(path.name for path in args.passages.glob("*.safetensors")))
        pool = passages_of(load_documents(args.passages, names), checkpoint.tokenizer().decode, *around)
        print(f"{len(pool)} passages from {len(names)} shards: {', '.join(names)}")
        max_turn = args.max_len - args.max_reply - sum(around)
        stream = tasks.long_ones(args.seed, args.max_reply, encode, pool, max_turn)
    collect(
        checkpoint,
        encode,
        stream,
        args.out,
        name=f"{args.kind}-{args.seed}",
        num_slots=args.slots,
        max_len=args.max_len,
        seed=args.seed,
        max_tokens=args.tokens,
        shard_tokens=args.shard_tokens,
    )


def keep(args: argparse.Namespace) -> dict[str, Any]:
    """Write the texts of ``--shards`` to one file."""
    names = tuple(sorted(path.name for path in args.shards.glob("*.safetensors")))
    if not names:
        raise FileNotFoundError(f"no shards in {args.shards}")
    write_texts(args.out, load_documents(args.shards, names))
    texts = read_texts(args.out)
    return {"texts": len(texts), "tokens": sum(len(text.tokens) for text in texts), "bytes": args.out.stat().st_size}


def recompute(args: argparse.Namespace) -> None:
    """Write shards with the hidden rows of the kept texts."""
    checkpoint, texts = open_checkpoint(args.target), read_texts(args.texts)
    target = FrozenTarget(checkpoint.dense_config, checkpoint.target_tensors(), numerics="rotated")
    args.out.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode(), tqdm(total=sum(len(text.tokens) for text in texts), unit="tok") as progress:

        def documents() -> Iterator[Document]:
            for document in with_rows(texts, target, faster_dtype()):
                progress.update(len(document.tokens))
                yield document

        write_shards(args.out, args.texts.stem, documents(), shard_tokens=args.shard_tokens)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Fit until ``--steps``; the sub-vocabulary is chosen once, when the run begins."""
    checkpoint = open_checkpoint(args.target, args.start)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.start:
        module, start_ids = module_of_part(checkpoint)
        _keep_draft_ids(args.out, start_ids)
        keep_start_record(args.out, checkpoint)
    else:
        torch.manual_seed(args.seed)
        module = module_from_last_layer(checkpoint.dense_config, checkpoint.target_tensors())
    draft_ids, dtype = _draft_ids(args, checkpoint.dense_config.vocab_size), faster_dtype()
    settings = FitSettings(
        steps=args.steps,
        seed=args.seed,
        lr=args.lr,
        decay_start=args.decay_start,
        batch_rows=args.batch_rows,
        num_chains=args.chains,
        depth_weights=tuple(args.depth_weights),
        sharpness=args.sharpness,
        divergence=args.divergence,
        compute_dtype=str(dtype).removeprefix("torch."),
    )
    frozen = frozen_parts(checkpoint, draft_ids, dtype)
    trainer = Trainer(module, frozen, settings, shards=args.shards, folder=args.out)
    names = tuple(sorted(path.name for path in args.shards.glob("*.safetensors")))
    held_out = [doc for doc in load_documents(args.shards, names) if is_held_out(doc) and doc.greedy]
    held_out = held_out[:: max(1, len(held_out) // _HELD_OUT_DOCUMENTS)]

    def evaluate() -> dict[str, Any]:
        return _report(total(measure(module, held_out, frozen, draft_ids)))

    trainer.run(save_every_s=args.save_every, evaluate=evaluate)
    return {"step": trainer.state.step, "rows": trainer.state.rows, "held_out": evaluate()}


def acceptance(args: argparse.Namespace) -> dict[str, Any]:
    """Measure an MTP part on benchmark prompts: overall and by category."""
    checkpoint = open_checkpoint(args.target, args.mtp)
    with args.prompts.open() as lines:
        questions = [json.loads(line) for line in lines][:: args.every]
    documents = own_replies(
        checkpoint,
        [q["turns"][0] for q in questions],
        args.cache,
        max_reply=args.max_reply,
        temperature=args.temperature,
    )
    module, draft_ids = module_of_part(checkpoint)
    draft_ids = draft_ids[: args.vocab]
    frozen = frozen_parts(checkpoint, draft_ids, torch.float32)
    if args.temperature:
        target = FrozenTarget(checkpoint.dense_config, checkpoint.target_tensors(), numerics="rotated")
        results = measure_sampled(
            module,
            documents,
            frozen,
            draft_ids,
            target.logits,
            Sampling(temperature=args.temperature),
            depth=args.depth,
            prompt_lookup=args.prompt_lookup,
        )
    else:
        results = measure(module, documents, frozen, draft_ids, depth=args.depth, prompt_lookup=args.prompt_lookup)
    kinds = [q["category"] for q in questions]
    return {
        "prompts": len(questions),
        "reply_tokens": sum(len(doc.tokens) - doc.prompt_len for doc in documents),
        "max_reply": args.max_reply,
        "draft_vocab": len(draft_ids),
        "temperature": args.temperature,
        "prompt_lookup": args.prompt_lookup,
        "all": _report(total(results, args.depth)),
        "by_category": {
            kind: _report(total([r for r, k in zip(results, kinds, strict=True) if k == kind], args.depth))
            for kind in sorted(set(kinds))
        },
    }


def module_of_part(checkpoint: Checkpoint) -> tuple[MtpModule, torch.Tensor]:
    """The module of an MTP part as it is stored, and its draft token ids, most frequent first."""
    prefix = f"model.layers.{checkpoint.dense_config.num_layers}."
    stored = {name.removeprefix(prefix): value for name, value in checkpoint.mtp_tensors().items()}
    draft_ids = stored.pop("draft_token_ids")
    module = MtpModule(checkpoint.dense_config)
    module.load_state_dict({name: stored[name].float() for name in module.state_dict()})
    return module, draft_ids


def frozen_parts(checkpoint: Checkpoint, draft_ids: torch.Tensor, dtype: torch.dtype) -> Frozen:
    """The target's embedding, norm and the head rows of the sub-vocabulary."""
    embed_Vd = checkpoint.target_tensors()["model.embed_tokens.weight"]
    head_Vd = checkpoint.target_tensors().get("lm_head.weight", embed_Vd)
    return Frozen(
        embed_Vd=embed_Vd.to(dtype),
        norm_d=checkpoint.target_tensors()["model.norm.weight"],
        head_Vd=head_Vd[draft_ids.long()].to(dtype),
        norm_eps=checkpoint.dense_config.rms_eps,
    )


def _keep_draft_ids(folder: Path, ids: torch.Tensor) -> None:
    path = folder / "draft_token_ids.json"
    if not path.exists():
        path.write_text(json.dumps(ids.tolist()))


def _draft_ids(args: argparse.Namespace, vocab_size: int) -> torch.Tensor:
    path: Path = args.out / "draft_token_ids.json"
    if not path.exists():
        names = tuple(sorted(shard.name for shard in args.shards.glob("*.safetensors")))
        counts = count_reply_tokens(load_documents(args.shards, names), vocab_size)
        ids = rank_tokens(counts, args.vocab)
        print(f"sub-vocabulary of {args.vocab}: covers {coverage(counts, ids):.4f} of {int(counts.sum())} reply tokens")
        _keep_draft_ids(args.out, ids)
    return torch.tensor(json.loads(path.read_text()), dtype=torch.int32)


def _report(result: Acceptance) -> dict[str, Any]:
    return {
        "rounds": result.num_rounds,
        "by_position": [round(x, 4) for x in result.by_position],
        "e_r": round(result.expected_progress, 4),
    }
