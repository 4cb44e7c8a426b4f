"""Host runs: a recipe, shrunk to what a CPU does in a second or two, with real numbers on all its ranks.

Losses, gradients and parameters are real, memory is another machine's: nothing here is compared with what a GPU or a
virtual GPU measures. Runs in the pytest process, so it imports neither torch nor Megatron; any build of torch will do.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .. import incompatibilities
from ..compare import differences_lines, matched
from ..errors import IncompatibleSettings, UserError
from ..measurement import Device, Failure, HostStep, Measurement
from ..recipe import Memory, Model, Parallelism, Recipe, Training
from ..validation import BadKey, show
from . import launch
from .ranks import Ranks
from .server import WITHOUT_TRANSFORMER_ENGINE
from .workers import CallResult, Workers

NOT_GATED = "host: memory is not gated"

DEVICE = Device(
    key="host",
    name="the host's CPU",
    capacity=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    virtual=False,
)

Precision = Literal["fp32", "bf16"]

TOLERANCE: Mapping[Precision, float] = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest relative error of a tensor (see `ParityRow.error`) that is still rounding.

Recompute and offload repeat the same operations on the same numbers and mostly differ by nothing at all. A setting that
sums in another order differs by rounding: 6e-8 a sum in fp32, which grows with the square root of its length and with
depth (5e-7 was seen at this size), and 4e-3 a stored value in bf16. Some twenty and five times that still finds a
dropout mask that is not replayed, a gradient that is counted twice or left out, and, in bf16, a factor that is wrong by
two percent.
"""

UPDATE_TOLERANCE: Mapping[Precision, float] = {"fp32": 1e-4, "bf16": 5e-2}
"""The same of a parameter's update, a quotient, which magnifies the rounding of small gradients (3.5e-6 was seen in
fp32 where the gradients had 4e-7). An update that is skipped is an error of 1, one of the wrong sign of 2."""

_MOST_RANKS = 8  # processes at a time

_TRAIN, _PARITY = (f"pytest_mbmem.measure.host_worker:{name}" for name in ("train", "parity"))


# Shrinking ------------------------------------------------------------------------------------------------------------

_GPU_ALONE = (
    "fp8",
    "fp4",
    "moe_router_padding_for_",
    "cuda_graph_",
    "gradient_accumulation_fusion",
    "apply_rope_fusion",
    "moe_permute_fusion",
    "cross_entropy_fusion_impl",
    "use_te_activation_func",
)
"""What settings of `Recipe.megatron` begin with that the host goes without."""


def shrunk(recipe: Recipe, precision: Precision | None = None, microbatches: int = 2) -> Recipe:
    """The recipe at the size of a host run.

    Kept: the make of the model, which kinds of parallelism and memory settings there are, the optimizer and the steps.
    Two ranks of each kind of parallelism that has more than one, data parallelism given up where that makes more than
    8; two layers a model chunk, evenly split; hidden size 128 in 4 heads; at most 2 key/value groups, 8 experts of
    which a token visits 2, a vocabulary of 250 and 64 tokens; `microbatches` microbatches of at most 2 samples. What
    only a GPU has is left out: fused softmax, Transformer Engine and what it or CUDA alone does (`_GPU_ALONE`),
    compiling, flash attention (context parallelism has it, whatever the backend) and allocator settings. `precision`
    takes the place of the recipe's own.

    Raises `UserError` where that is not possible.
    """
    parallelism = _shrunk_parallelism(recipe.parallelism)
    per_chunk = _layers_per_chunk(recipe)
    layers = parallelism.pp * (parallelism.vpp or 1) * min(per_chunk, 2)
    try:
        return dataclasses.replace(
            recipe,
            model=_shrunk_model(recipe.model, layers),
            parallelism=parallelism,
            training=_shrunk_training(recipe, parallelism, precision, microbatches),
            memory=_shrunk_memory(recipe.memory, per_chunk),
            megatron={name: value for name, value in recipe.megatron.items() if not name.startswith(_GPU_ALONE)},
            lora=recipe.lora and dataclasses.replace(recipe.lora, rank=min(recipe.lora.rank, 8)),
        )
    except BadKey as error:
        raise UserError(f"the recipe cannot be shrunk for the host: {error}") from None


def _shrunk_parallelism(given: Parallelism) -> Parallelism:
    sizes: dict[str, Any] = {name: min(2, getattr(given, name)) for name in ("tp", "pp", "cp", "dp", "ep")}
    if sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"] > _MOST_RANKS:
        sizes["dp"] = 1
    if sizes["tp"] * sizes["cp"] * sizes["dp"] % (min(2, given.expert_tp) * sizes["ep"]):
        sizes["ep"] = 1
    even = Parallelism()
    return dataclasses.replace(
        given,
        **sizes,
        vpp=given.vpp and 2,
        etp=given.etp and min(2, given.etp),
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        account_for_embedding_in_pipeline_split=even.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=even.account_for_loss_in_pipeline_split,
        pipeline_model_parallel_layout=even.pipeline_model_parallel_layout,
    )


_NO_FP32 = "context parallelism needs flash attention, which has no fp32"


def _possible(recipe: Recipe) -> tuple[dict[Precision, str], list[Precision]]:
    """Precisions that a host run of the recipe cannot have, with the reason, and those that it can."""
    left_out: dict[Precision, str] = {"fp32": _NO_FP32} if _needs_flash(recipe.training, recipe.parallelism) else {}
    return left_out, [precision for precision in TOLERANCE if precision not in left_out]


def _needs_flash(training: Training, parallelism: Parallelism) -> bool:
    """Whether the host has to have flash attention: unfused attention has no context parallelism."""
    return parallelism.cp > 1 and training.attention_backend != "unfused"


def _layers_per_chunk(recipe: Recipe) -> int:
    return max(1, recipe.model.num_layers // (recipe.parallelism.pp * (recipe.parallelism.vpp or 1)))


def _shrunk_model(model: Model, layers: int) -> Model:
    is_small = model.hidden_size <= 128 and model.num_attention_heads <= 4
    hidden, heads = (model.hidden_size, model.num_attention_heads) if is_small else (128, 4)
    groups = model.num_query_groups and min(model.num_query_groups, 2 if model.query_groups > 1 else 1)
    if model.num_query_groups == model.num_attention_heads:
        groups = heads
    model = model.shrunk(layers=min(layers, model.num_layers))
    moe, mla = model.moe, model.mla
    if moe is not None:
        moe = dataclasses.replace(
            moe,
            num_moe_experts=min(moe.num_moe_experts, 8),
            moe_router_topk=min(moe.moe_router_topk, 2),
            moe_ffn_hidden_size=moe.moe_ffn_hidden_size and 64,
            moe_shared_expert_intermediate_size=moe.moe_shared_expert_intermediate_size and 64,
            moe_layer_freq=_repeated(moe.moe_layer_freq, layers),
            overload=1.0,  # real tokens choose their experts
        )
    if mla is not None:
        mla = dataclasses.replace(
            mla,
            q_lora_rank=mla.q_lora_rank and 32,
            kv_lora_rank=32,
            qk_head_dim=16,
            qk_pos_emb_head_dim=8,
            v_head_dim=16,
        )
    return dataclasses.replace(
        model,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=model.kv_channels and 16,
        ffn_hidden_size=model.ffn_hidden_size and min(model.ffn_hidden_size, 256),
        vocab_size=min(model.vocab_size, 250),
        make_vocab_size_divisible_by=min(model.make_vocab_size_divisible_by, 128),
        max_position_embeddings=model.max_position_embeddings and min(model.max_position_embeddings, 64),
        mtp_num_layers=model.mtp_num_layers and 1,
        moe=moe,
        mla=mla,
    )


def _repeated(pattern: Any, layers: int) -> Any:
    """The pattern of dense and expert layers over more layers than it has: a pipeline's stages get one at least."""
    return pattern if isinstance(pattern, int) else tuple(pattern[i % len(pattern)] for i in range(layers))


def _shrunk_training(
    recipe: Recipe, parallelism: Parallelism, precision: Precision | None, microbatches: int
) -> Training:
    training = recipe.training
    samples = min(training.micro_batch_size, 2)
    kept: Any = precision or training.precision
    flash = _needs_flash(training, parallelism)
    if flash and kept == "fp32":
        raise UserError(f'parallelism.cp: {_NO_FP32}; leave fp32 out: precisions=("bf16",)')
    return dataclasses.replace(
        training,
        micro_batch_size=samples,
        global_batch_size=samples * parallelism.dp * microbatches,
        seq_length=min(training.seq_length, 64),
        precision=kept,
        main_grads=training.main_grads if kept == "bf16" else "fp32",
        attention_backend="flash" if flash else "unfused",
        masked_softmax_fusion=False,
        transformer_impl="local",
        jit_fusion="eager" if training.jit_fusion == "compiled" else training.jit_fusion,
    )


def _shrunk_memory(memory: Memory, per_chunk: int) -> Memory:
    """`per_chunk`: layers of a model chunk before shrinking, which leaves one or two."""
    few, number = min(per_chunk, 2), memory.recompute_num_layers
    if number is not None:
        some = number < per_chunk if memory.recompute_method == "block" else number == 1
        number = 1 if some else few
    return dataclasses.replace(
        memory,
        alloc_conf="",
        recompute_num_layers=number,
        cpu_offloading_num_layers=memory.cpu_offloading_num_layers and 1,
        min_offloaded_tensor_size=1 if memory.offload_modules else memory.min_offloaded_tensor_size,
    )


def _how(recipe: Recipe, small: Recipe) -> str:
    """What shrinking changed."""
    changed = [f"{key} {show(was)} -> {show(now)}" for key, (was, now) in recipe.differences(small).items()]
    return f"shrunk for the host: {', '.join(changed)}" if changed else "not shrunk: it has the host's size"


# Parity ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParityRow:
    """All tensors of one kind of the control and the candidate, in one precision."""

    precision: Precision
    kind: str  # "output", "input gradient", "weight gradient", "main_grad", "parameter update"
    tensors: int  # over all ranks and microbatches
    equal: int  # of them to the last bit
    zero: int  # of the equal ones are zero on both sides and so say nothing
    error: float  # largest absolute difference over the control's largest absolute value, of the worst tensor
    name: str  # of the worst tensor
    rank: int  # on which it is
    remark: str = ""  # why its error is infinite

    @property
    def tolerance(self) -> float:
        """What the error may be."""
        return (UPDATE_TOLERANCE if self.kind == "parameter update" else TOLERANCE)[self.precision]

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance, and anything was compared."""
        return self.error <= self.tolerance and self.zero < self.tensors

    def explain(self) -> str:
        """What is wrong with it, on one line."""
        if self.tensors and self.zero == self.tensors:
            return (
                f"{self.precision} {self.kind}: all {self.tensors} tensors are zero on both sides: nothing to compare"
            )
        error = f"relative error {self.error:.2g}" + (f" ({self.remark})" if self.remark else "")
        allowed = f"tolerance {self.tolerance:g}"
        return f"{self.precision} {self.kind}: {error}, {allowed}: {self.name} on rank {self.rank}"


@dataclass(frozen=True)
class Parity:
    """A candidate whose numbers were compared with its control's."""

    differences: Mapping[str, tuple[Any, Any]]  # the settings under test: key -> (the control's, the candidate's)
    ranks: int  # processes of each side
    shrunk: str  # how both were made smaller
    rows: tuple[ParityRow, ...]
    left_out: Mapping[Precision, str] = field(default_factory=dict)  # precisions that are not possible, and why

    @property
    def passed(self) -> bool:
        """Whether all rows are within their tolerance."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    def error(self, kind: str | None = None, precision: Precision | None = None) -> float:
        """The largest relative error of all rows, or of a kind or a precision. Raises `UserError` if there are none."""
        chosen = [r for r in self.rows if kind in (None, r.kind) and precision in (None, r.precision)]
        if not chosen:
            have = ", ".join(dict.fromkeys(f"{row.precision} {row.kind}" for row in self.rows))
            raise UserError(f"kind={kind!r}, precision={precision!r}: nothing was compared; there are {have}")
        return max(row.error for row in chosen)

    def table(self) -> str:
        """All rows, aligned, and what was left out."""
        head = ["", "tensors", "equal", "largest error", "tolerance"]
        cells = [
            [f"{r.precision} {r.kind}", str(r.tensors), str(r.equal), f"{r.error:.2g}", f"{r.tolerance:g}"]
            for r in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in (head, *cells)]
        left_out = [f"{precision} left out: {reason}" for precision, reason in self.left_out.items()]
        return "\n".join(["  ".join(line) for line in lines] + left_out)

    def explain(self) -> str:
        """The settings under test, what is wrong, the table and how small it was."""
        wrong = [row.explain() for row in self.rows if not row.passed]
        return "\n".join(
            [
                "control -> candidate: " + "; ".join(differences_lines(self.differences)),
                *wrong,
                "",
                self.table(),
                f"on {self.ranks} rank{'s' if self.ranks > 1 else ''}; {self.shrunk}",
            ]
        )


# Running --------------------------------------------------------------------------------------------------------------


class HostLauncher(Workers):
    """Runs recipes on the host's CPU. Needs no GPU, no driver and no CUDA build of torch.

    Args:
        timeout: seconds that one run of all ranks may take.
    """

    def __init__(self, *, timeout: float = 600.0) -> None:
        super().__init__(timeout=timeout, jobs=1)  # the ranks of one run already share the cores

    @property
    def device(self) -> Device:
        """What runs are made on."""
        return DEVICE

    def command_environment(self) -> dict[str, str]:
        """The environment of a process that sees no GPU."""
        return {
            **super().command_environment(),
            "CUDA_VISIBLE_DEVICES": "",
            WITHOUT_TRANSFORMER_ENGINE: "1",
            "GLOO_SOCKET_IFNAME": "lo",  # all ranks are here, whatever the host's name resolves to
            "OMP_NUM_THREADS": "1",
        }

    def measure(self, recipe: Recipe, *, ranks: Ranks = "distinct") -> Measurement:
        """Train the recipe's steps, shrunk, on all its ranks: `steps` have losses, and there are no bytes.

        A value that is not finite or a step that the optimizer skips is the measurement's `failure`, as is what goes
        wrong in a worker. Only fp16's optimizer skips steps, those whose scaled gradients overflow; its loss scale
        begins at 2**10, so that the first steps are none of them. Raises `UserError` for a recipe that cannot run here.
        """
        launch.check(recipe)
        small = shrunk(recipe, microbatches=min(2, recipe.num_microbatches))
        result = self._run(_TRAIN, {"recipe": small.to_dict()}, small)
        steps = tuple(HostStep(**fields) for fields in result["steps"])
        failure = result["failure"] and Failure(**{k: v for k, v in result["failure"].items() if k != "run"})
        return Measurement(
            device=DEVICE,
            ranks=(),
            recipe=recipe.to_dict(),
            recipe_digest=recipe.digest,
            world_size=recipe.world_size,
            environment=launch.versions(),
            notes=(NOT_GATED, _how(recipe, small)),
            failure=failure or next(_wrong_steps(steps), None),
            steps=steps,
            logs={"worker": result["output"]},
        )

    def parity(
        self, control: Recipe, candidate: Recipe, precisions: Sequence[Precision] | None = None
    ) -> Parity | Failure:
        """Compare one step of two microbatches of both, shrunk; or what went wrong in a worker.

        `precisions` None stands for all that are possible. Raises `UserError` where the recipes differ in more than
        memory settings or in nothing that the host has, and for a precision that is not possible.
        """
        for recipe in (control, candidate):
            launch.check(recipe)
        differences = matched(control, candidate, None, "mbmem.parity", remedy="Make them equal")
        choose = precisions is None
        left_out: dict[Precision, str] = {}
        if precisions is None:
            left_out, precisions = _possible(control)
        if not precisions or isinstance(precisions, str) or not set(precisions) <= set(TOLERANCE):
            raise UserError(f"mbmem.parity: precisions={show(precisions)}: allowed are {', '.join(TOLERANCE)}")
        rows: list[ParityRow] = []
        failed: Failure | None = None
        refused: IncompatibleSettings | None = None
        for precision in dict.fromkeys(precisions):
            small = [shrunk(recipe, precision) for recipe in (control, candidate)]
            try:
                for recipe in small:
                    incompatibilities.check(recipe, f"mbmem.parity: in {precision}")
            except IncompatibleSettings as error:
                if not choose:
                    raise
                refused = error
                left_out[precision] = f"{', '.join(error.ids)} (see mbmem explain)"
                continue
            if small[0] == small[1]:
                listed = "; ".join(differences_lines(differences))
                raise UserError(f"mbmem.parity: the host has nothing that this changes: {listed}")
            result = self._run(_PARITY, {"control": small[0].to_dict(), "candidate": small[1].to_dict()}, small[1])
            failure = result["failure"]
            if failure is not None:
                side = failure.pop("run")
                failed = Failure(**{**failure, "message": f"{side}, {precision}: {failure['message']}"})
                if failed.kind != "refused" or not choose:
                    return failed
                left_out[precision] = f"{side}: {failure['message']}"
            rows += [ParityRow(precision=precision, **fields) for fields in result["rows"]]
        if failed is not None and not rows:  # refused in every precision
            return failed
        if refused is not None and not rows:
            raise refused
        return Parity(differences, small[0].world_size, _how(control, small[0]), tuple(rows), left_out)

    def _run(self, target: str, arguments: dict[str, Any], small: Recipe) -> dict[str, Any]:
        """What the worker returns, or its `failure` if it did not come to its end."""
        limit = 0.8 * self.timeout  # of a collective, so that a rank can still say for what it waits
        environment = launch.recipe_environment(small)
        result: CallResult = self.call(target, {**arguments, "timeout": limit}, environment=environment)
        if result.failure is None:
            return {**result.value, "output": result.output}
        message = f"{result.message}\n{result.output[-4000:]}".strip()
        failure = {"run": "", "kind": result.failure, "rank": 0, "message": message}
        return {"steps": [], "rows": [], "failure": failure, "output": result.output}


def _wrong_steps(steps: Sequence[HostStep]) -> Iterator[Failure]:
    for number, step in enumerate(steps, 1):
        reason = f"{step.not_finite} is not finite" if step.not_finite else ""
        if step.skipped and step.loss is not None:
            message = f"the optimizer skipped step {number}" + (reason and f": {reason}")
            yield Failure("skipped step", 0, message, number)
        elif reason:
            yield Failure("not finite", 0, f"{reason} in step {number}", number)
