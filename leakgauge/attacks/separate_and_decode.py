"""Separate, peel, decode, finish: images from an update of ordinary training (our own).

1. *Separate* and *peel*, as the exact recursion does, also under batch norm in train mode and over
   several local steps: every record's activations at some inner ReLU, to a few millionths.
2. *Decode*. Public images, run through the observed model, have such activations too: a small
   decoder is fitted to lead back from them. That is done before the update is read, once for each
   model. Where it can read from is found by a rehearsal, the attack on an update that public images
   cause: it is the first node with enough activations, which most updates reach. A second one reads
   from where records are told apart: an update that noise or rounding made rough is read no
   further.
3. *Finish*. From the decoder's images the search for the images whose activations, in the batches
   and with the weights of their own steps, are those that were read. Where a client took several
   steps, they are searched in turn: with the images of one its training is replayed, which gives
   the weights of all layers that the next began with.

Needs: the local training (SGD), the number of records, and public images of the same kind. No
labels. Under batch norm in train mode a batch's contrast is open: it is that of the decoder's
images. The residual is the relative distance of the update that the found batch leads to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from leakgauge.attacks._decoder import Fit, decode, fit
from leakgauge.attacks._layers import rehearsing
from leakgauge.attacks.exact_recursion import ExactRecursion, Read
from leakgauge.errors import NotApplicable, Withheld
from leakgauge.fl.local import train
from leakgauge.papers import Paper
from leakgauge.ranges import count, option
from leakgauge.records import pictures
from leakgauge.types import (
    Batch,
    Kept,
    Knowledge,
    Observation,
    Preparation,
    Reconstruction,
    Resources,
    Target,
)

ENOUGH = 4  # times as many activations as an image has values: the search needs no more


@dataclass(frozen=True)
class SeparateAndDecode:
    """Reads activations exactly, decodes, searches (our own)."""

    papers: ClassVar[tuple[Paper, ...]] = ExactRecursion.papers
    steps: int = option(1000, count(10_000_000))  # of the decoder's fit
    images: int = option(9000, count(10_000_000))  # public ones that it uses, at most
    evaluations: int = option(300, count(10_000_000))  # of the finish, of all images of a step
    needs: ClassVar[frozenset[Knowledge]] = frozenset({"training", "records", "public", "weights"})
    manipulates: ClassVar[bool] = False

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        public = target.public
        if public is None or not len(public):
            raise Withheld("separate-and-decode fits a decoder to public images, and holds none")
        training = rehearsing(target, "separate-and-decode")
        resources = resources or Resources()
        record = pictures(target.record)
        picked = torch.randperm(len(public), generator=rng)[: target.records]
        picked = picked.repeat(-(-target.records // len(picked)))[: target.records]
        labels = torch.randint(target.task.count, (target.records,), generator=rng)
        rehearsed = train(target.setting, Batch(public.inputs[picked], labels), training, rng)
        seen = Observation(target.setting, rehearsed.update, training, target.records)
        enough = ENOUGH * math.prod(record.shape)
        read = Read(seen, rng, replace(resources, progress=None), enough=enough, brief=True)
        if read.done.lowest is read.trace.input:
            return Preparation(Kept(facts={"reach": read.trace.input.name, "nodes": {}}))
        # Another update may be read less far: what it reads from is the first node with enough.
        wide = [n for n in read.done.known if read.trace.shape[n].numel() >= enough]
        node = wide[0] if wide else read.done.lowest
        size = min(training.batch_size, target.records)
        nodes = list(dict.fromkeys([node.name, read.begun.source.name]))
        options = Fit(steps=self.steps, images=self.images)
        free = bool(read.trace.norms)
        kept = fit(
            read.trace, nodes, record, public, size, rng,
            free_scale=free, options=options, resources=resources,
        )  # fmt: skip
        return Preparation(Kept(kept.tensors, dict(kept.facts) | {"reach": node.name}))

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        if seen.kept is None or seen.records is None:
            raise Withheld("separate-and-decode needs 'records' and what its prepare() kept")
        resources, facts = resources or Resources(), seen.kept.facts
        enough = ENOUGH * math.prod(pictures(seen.record).shape)
        read = Read(seen, rng, resources, reach=str(facts["reach"]), enough=enough)
        node, begin, notes = self._decoded(read, seen.kept)
        images, misfits = read.finish(begin, self.evaluations)
        chosen = read.begun.once(seen.records)
        inputs = seen.record.leaving(images[chosen]).clamp(0, 1).float()
        labels = read.begun.labels[chosen]
        if read.done.stopped:
            notes.append(f"the peeling stopped at {read.done.stopped}")
        told: dict[str, Any] = {}
        if node:
            told = {
                "decoder_node": node, "decoder_psnr": facts["nodes"][node]["psnr"],
                "decoder_mean_psnr": facts["mean_psnr"],
                "decoder_public_images": facts["public_images"],
            }  # fmt: skip
        return Reconstruction(
            inputs=inputs,
            labels=labels,
            residual=read.residual(inputs, labels),
            stopped="time" if read.watch.notes else "done",
            notes=tuple(notes + read.watch.notes),
            facts=read.facts() | told | {"misfits": misfits[chosen].tolist()},
        )

    def _decoded(self, read: Read, kept: Kept) -> tuple[str, Tensor, list[str]]:
        """The node that was decoded, normalised images to begin the finish with, one per
        appearance, and what to say."""
        found = {node.name: value for node, value in read.done.known.items()}
        if read.done.lowest is read.trace.input:
            return "", read.done.known[read.trace.input], []
        name = next((name for name in kept.facts["nodes"] if name in found), None)
        if name is None:
            raise NotApplicable(
                f"its decoders read from {' and '.join(kept.facts['nodes']) or 'no node'}, and of "
                f"this update the activations were read no further than {read.done.lowest.name}"
            )
        alone = read.trace.alone
        groups = (torch.arange(len(found[name])),) if alone else read.begun.steps
        images = torch.zeros(len(found[name]), *read.trace.shape[read.trace.input])
        for group in groups:
            images[group] = read.seen.record.entering(decode(kept, name, found[name][group]))
        psnr = kept.facts["nodes"][name]["psnr"]
        notes = [
            f"a decoder fitted to {kept.facts['public_images']} public images of "
            f"{kept.facts['public']} ({psnr:.1f} dB on others of them) gave the start"
        ]
        return name, images, notes
