"""Two gates, judged apart: is the target complete, and is the MTP part complete and made for this target.

A gate only lists problems; whoever needs the part calls `require`. A broken MTP part never stops target-only use, and
nothing here looks at what the numbers mean: without a recorded fingerprint (`seal.py`) a wrongly *declared* fusion
order passes, since no value reveals it; an undeclared one does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from seqmtp_serve.checkpoint import family, names
from seqmtp_serve.checkpoint import gate_declarations as declared
from seqmtp_serve.checkpoint import gate_tensors as checks
from seqmtp_serve.checkpoint.block_scaled_source import scale_shapes
from seqmtp_serve.checkpoint.fingerprint import tensor_fingerprint
from seqmtp_serve.checkpoint.fusion import projection_for_he
from seqmtp_serve.checkpoint.manifest import Fingerprints
from seqmtp_serve.checkpoint.parts import MtpPart, TargetPart
from seqmtp_serve.checkpoint.problem import Problem, ProblemKind
from seqmtp_serve.errors import CheckpointError, MtpIncomplete, TargetIncomplete


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One gate's verdict. `error` is raised by `require` and carries the first problem and the count of the rest."""

    name: str
    problems: tuple[Problem, ...]
    error: type[CheckpointError]

    @property
    def ok(self) -> bool:
        return not self.problems

    def require(self) -> None:
        """Raise this gate's error unless it passed."""
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise self.error(f"{self.problems[0]}{more}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """Both verdicts. `mtp` is None when no MTP part was given: nothing is wrong then, there is just no speculation."""

    target: Gate
    mtp: Gate | None


def target_gate(target: TargetPart, foreign_layers: Iterable[int], *, deep: bool) -> Gate:
    """Names, shapes and dtypes from headers; with `deep` also every value, and a duplicate head against its tie.

    `foreign_layers` are layer ids that share the files and are not the target's to judge.
    """
    config, source = target.config, target.source
    expected = family.target_shapes(config)
    expected |= scale_shapes(source.specs, expected, target.blocks)
    foreign = tuple(names.layer_prefix(layer) for layer in foreign_layers)
    tie = {names.HEAD: expected[names.EMBEDDING]} if config.tie_word_embeddings else {}
    present = {name for name in source.specs if not name.startswith(foreign)}
    problems = list(checks.header_problems(source, expected, present, tie, target.blocks))
    sound = present - {problem.subject for problem in problems}
    if deep:
        problems += checks.value_problems(source, sorted(sound & expected.keys()))
        if tie and sound >= {names.HEAD, names.EMBEDDING}:
            embedding = tensor_fingerprint(source.read(names.EMBEDDING))
            problems += checks.fingerprint_problems(source, names.HEAD, embedding)
    return Gate(name="target", problems=tuple(problems), error=TargetIncomplete)


def mtp_gate(part: MtpPart, target: TargetPart, shared: Fingerprints | None, *, deep: bool) -> Gate:
    """The declarations against the target, then names, shapes, sub-vocabulary, copies of shared tensors and the fusion.

    `deep` looks at every value as well. `shared` is None when the target's shared tensors cannot be read: then this
    gate cannot pass either.
    """
    problems = list(declared.declaration_problems(part, target))
    if shared is None:
        detail = "the target's own tensor cannot be read, so nothing can be made for it"
        problems.append(Problem(kind=ProblemKind.UNREADABLE, subject=names.EMBEDDING, detail=detail))
    elif not problems:
        problems += declared.fingerprint_problems(part.manifest, shared)
        problems += _layer_problems(part, target, shared, deep=deep)
    return Gate(name="mtp", problems=tuple(problems), error=MtpIncomplete)


def failed_gate(error: CheckpointError) -> Gate:
    """The gate of an MTP part that could not even be opened."""
    subject, _, detail = str(error).partition(": ")
    problem = Problem(kind=ProblemKind.DECLARATION, subject=subject, detail=detail or str(error))
    return Gate(name="mtp", problems=(problem,), error=MtpIncomplete)


def _layer_problems(part: MtpPart, target: TargetPart, shared: Fingerprints, *, deep: bool) -> Iterator[Problem]:
    manifest, source, config = part.manifest, part.source, target.config
    prefixes = tuple(names.layer_prefix(layer) for layer in manifest.mtp_layer_ids)
    known = {*source.specs, *source.unreadable}
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in known):
            detail = "the whole MTP layer is missing: the checkpoint was converted or quantised without it"
            yield Problem(kind=ProblemKind.MISSING, subject=prefix.rstrip("."), detail=detail)
            return
    shapes = family.mtp_layer_shapes(config, manifest.config())
    expected = {prefix + name: shape for prefix in prefixes for name, shape in shapes.items()}
    copies = {prefix + name: owner for prefix in prefixes for name, owner in names.MTP_DUPLICATES.items()}
    if manifest.final_norm_owner == "main":
        copies |= {prefix + names.SHARED_NORM: names.FINAL_NORM for prefix in prefixes}
    owners = {names.EMBEDDING: shared.embedding, names.HEAD: shared.head, names.FINAL_NORM: shared.output_norm}
    table, norm = (config.vocab_size, config.hidden_size), (config.hidden_size,)
    optional = {name: norm if owner == names.FINAL_NORM else table for name, owner in copies.items()}
    for group in (expected, optional):
        group |= scale_shapes(source.specs, group, part.blocks)
    present = {name for name in source.specs if part.own_files or name.startswith(prefixes)}

    header = list(checks.header_problems(source, expected, present, optional, part.blocks))
    yield from header
    sound = present - {problem.subject for problem in header}
    for name in sorted(sound):
        if name.endswith(names.DRAFT_TOKEN_IDS):
            yield from checks.draft_vocab_problems(source, name, config.vocab_size)
    for name in sorted(sound & copies.keys()):
        yield from checks.fingerprint_problems(source, name, owners[copies[name]])
    for name, wanted in manifest.fusion_fingerprints:
        if name in sound:
            yield from _fusion_problems(part, name, config.hidden_size, wanted)
    if deep:
        yield from checks.value_problems(source, sorted(sound & expected.keys()))
        declared_values = dict(manifest.tensor_fingerprints)
        for name in sorted(sound & declared_values.keys()):
            yield from checks.fingerprint_problems(source, name, declared_values[name])


def _fusion_problems(part: MtpPart, name: str, hidden_size: int, wanted: str) -> Iterator[Problem]:
    """`eh_proj` in one order, whatever order is stored and declared: shows a declaration that is not the weights'."""
    try:
        stored = part.source.read(name)
    except CheckpointError:
        return
    turned = projection_for_he(stored, hidden_size, part.manifest.fusion_order)
    if tensor_fingerprint(turned) != wanted:
        detail = f"is not in the declared fusion order, {part.manifest.fusion_order}, or holds other values"
        yield Problem(kind=ProblemKind.FINGERPRINT, subject=name, detail=detail)
