"""Which layers a pipeline stage has, and how many microbatches it has begun and not ended when it holds most."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..recipe import Recipe


@dataclass(frozen=True)
class Chunk:
    """One model chunk of a pipeline stage."""

    layers: tuple[int, ...]  # by number, from 0
    embedding: bool = False
    output: bool = False
    mtp: int = 0  # layers of multi-token prediction

    @property
    def has_embedding(self) -> bool:
        """Whether it holds the word embedding: as its input, or for the tokens that multi-token prediction embeds."""
        return self.embedding or self.mtp > 0


def stages(recipe: Recipe) -> list[tuple[Chunk, ...]]:
    """The model chunks of each pipeline stage, as Megatron Core 0.16 shares layers out.

    Of a recipe that `incompatibilities.check` accepts; other sizes may leave layers out. Sources in Megatron Core:
    `get_num_layers_to_build` and `get_transformer_layer_offset`; for a layout, `PipelineParallelLayerLayout`.
    """
    split = recipe.parallelism
    if split.pipeline_model_parallel_layout:
        return _of_layout(split.pipeline_model_parallel_layout, split.pp)
    chunks = split.vpp or 1
    counts = _layers_of_stages(recipe)
    found: list[list[Chunk]] = [[] for _ in range(split.pp)]
    first = 0
    for chunk in range(chunks):
        for stage in range(split.pp):
            is_first, is_last = (chunk, stage) == (0, 0), (chunk, stage) == (chunks - 1, split.pp - 1)
            count = counts[stage] // chunks
            count -= is_first and split.account_for_embedding_in_pipeline_split
            count -= is_last and split.account_for_loss_in_pipeline_split
            mtp = (recipe.model.mtp_num_layers or 0) if is_last else 0
            found[stage].append(Chunk(tuple(range(first, first + count)), is_first, is_last, mtp))
            first += count
    return [tuple(chunks_of_stage) for chunks_of_stage in found]


def _layers_of_stages(recipe: Recipe) -> list[int]:
    """Layers of each stage, with the embedding and the loss where they count as one."""
    split = recipe.parallelism
    first, last = split.num_layers_in_first_pipeline_stage, split.num_layers_in_last_pipeline_stage
    layers = recipe.model.num_layers
    layers += split.account_for_embedding_in_pipeline_split + split.account_for_loss_in_pipeline_split
    own = {stage: count for stage, count in ((0, first), (split.pp - 1, last)) if count is not None}
    others = max(1, split.pp - len(own))
    even = (layers - sum(own.values())) // others
    return [own.get(stage, even) for stage in range(split.pp)]


def _of_layout(text: str, pp: int) -> list[tuple[Chunk, ...]]:
    """Of Megatron's text for a layout, whose stages come chunk by chunk."""
    text = text.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda match: match[1] * int(match[2]), text)
    found: list[list[Chunk]] = [[] for _ in range(pp)]
    first = 0
    for index, letters in enumerate(text.split("|")):
        layers = range(first, first + letters.count("t"))
        first = layers.stop
        found[index % pp].append(Chunk(tuple(layers), "E" in letters, "L" in letters, letters.count("m")))
    return [tuple(chunks) for chunks in found]


def in_flight(recipe: Recipe, stage: int, chunks: int) -> Sequence[int]:
    """Microbatches of each of the stage's chunks whose forward has run and whose backward has not, when it holds most.

    One forward, one backward (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM"): a stage runs ahead by as many microbatches as there are stages behind it. Interleaved, by
    twice as many chunks, and a round of all stages for each chunk but the last (`get_pp_rank_microbatches` of Megatron
    Core).
    """
    pp, microbatches = recipe.parallelism.pp, recipe.num_microbatches
    if chunks == 1:
        return [min(microbatches, pp - stage)]
    ahead = 2 * (pp - stage - 1) + (chunks - 1) * pp
    counts = [0] * chunks
    for number in range(min(microbatches * chunks, ahead + 1)):
        counts[_chunk_of(number, microbatches, pp, chunks)] += 1
    return counts


def _chunk_of(number: int, microbatches: int, pp: int, chunks: int) -> int:
    """The chunk of a forward by its number: rounds of `pp` microbatches through each chunk, the last round shorter."""
    round_, within = divmod(number, pp * chunks)
    return within // min(pp, microbatches - round_ * pp)
