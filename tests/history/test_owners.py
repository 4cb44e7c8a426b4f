"""Events of the allocator's history become owners: by identity, by code, by lifetime."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from pytest_mbmem.history.owners import attribute, fold, line_of
from pytest_mbmem.history.stamps import WORKSPACES, Identity, Mode, Stamp, read_identity, read_stamp
from pytest_mbmem.measurement import CATEGORIES, Owner, PhaseFigures

KIB = 1024
MCORE = "/opt/venv/lib/python3.11/site-packages/megatron/core"


class Events:
    """A history that is written down as it would have been recorded."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.metadata = ""
        self.serial = 0
        self.next_address = 2**40

    def begin(self, step: int, phase: str) -> None:
        self.serial += 1
        self.now = (self.serial, step, phase)
        self.at("forward", "")

    def at(self, mode: Mode, module: str) -> None:
        self.metadata = Stamp(*self.now, mode, module).text()

    def add(self, action: str, addr: int, size: int = 0, **more: Any) -> None:
        self.events.append({"action": action, "addr": addr, "size": size, "user_metadata": self.metadata, **more})

    def alloc(self, size: int, file: str = "", line: int = 1, name: str = "forward") -> int:
        frames = [{"filename": file, "line": line, "name": name}] if file else []
        address = self.next_address
        self.next_address += 2**30
        self.add("alloc", address, size, frames=frames)
        return address

    def free(self, address: int, size: int = 0) -> None:
        self.add("free_requested", address, size)
        self.add("free_completed", address, size)

    def identify(self, address: int, identity: Identity) -> None:
        self.metadata, before = identity.text(), self.metadata
        self.add("annotate", address)
        self.metadata = before


def test_stamps_read_what_they_wrote_and_nothing_else() -> None:
    stamp = Stamp(7, 1, "backward", "recompute", "decoder.layers.3.mlp")
    assert read_stamp(stamp.text()) == stamp
    assert read_stamp(Stamp(0, 0, "build", "forward", "").text()) == Stamp(0, 0, "build", "forward", "")
    identity = Identity("parameters", "decoder.layers.0.mlp.weight", 128)
    assert read_identity(identity.text()) == identity
    assert identity.module == "decoder.layers.0.mlp"
    for text in ("", "mbmem", "mbmem|a|1|x|forward|", "mbmem|1|1|x|sideways|", "my own words", identity.text()):
        assert read_stamp(text) is None
    for text in ("", "mbmem-is|parameters|x|", stamp.text()):
        assert read_identity(text) is None


def test_lifetimes_tell_activations_from_temporaries() -> None:
    run = Events()
    run.begin(1, "forward")
    run.at("forward", "decoder.layers.0.mlp")
    saved = run.alloc(3 * KIB, f"{MCORE}/transformer/mlp.py", 12)
    temporary = run.alloc(2 * KIB, f"{MCORE}/transformer/mlp.py", 13)
    run.free(temporary)
    run.at("forward", "decoder.layers.1.mlp")
    also = run.alloc(3 * KIB, f"{MCORE}/transformer/mlp.py", 12)
    run.begin(1, "backward")
    run.at("backward", "decoder.layers.1.mlp")
    gradient = run.alloc(KIB)
    for address in (also, saved, gradient):
        run.free(address)
    run.begin(1, "optimizer")
    state = run.alloc(5 * KIB, f"{MCORE}/optimizer/optimizer.py", 3, "step")
    assert state
    history = attribute(run.events)
    line = "megatron/core/transformer/mlp.py"
    activations = Owner("activations", "decoder.layers.*.mlp", f"{line}:12 (forward)", 2, "forward")
    assert history.peak == 7 * KIB
    assert history.phase_at(history.peak_event) == "step-1/backward"
    assert {o: s for o, s in history.at_peak.items() if s} == {
        activations: 6 * KIB,
        Owner("temporaries", "decoder.layers.*.mlp", phase="backward"): KIB,
    }
    phases = [
        PhaseFigures(1, "forward", {"allocated": 6 * KIB}, {}),
        PhaseFigures(1, "backward", {"allocated": 7 * KIB}, {}),
        PhaseFigures(1, "optimizer", {"allocated": 5 * KIB + 512}, {}),
    ]
    composition = history.composition(phases)
    assert composition.at(0) == {activations: 6 * KIB}
    assert composition.categories(2)["optimizer state"] == 5 * KIB
    # 512 bytes more than any rounding of these blocks explains
    assert composition.categories(2)["unattributed"] == 512
    levels = [sum(row[1:]) for row in composition.timeline]  # every event is a point here
    assert levels == [3072, 5120, 3072, 3072, 6144, 7168, 4096, 4096, 1024, 1024, 0, 0, 5120]
    assert [row[0] for row in composition.timeline] == [0] * 5 + [1] * 7 + [2]


def test_what_a_recomputed_forward_saves_is_an_activation() -> None:
    run = Events()
    run.begin(1, "backward")
    run.at("recompute", "mlp")
    saved, temporary = run.alloc(KIB, f"{MCORE}/a.py"), run.alloc(KIB, f"{MCORE}/b.py")
    run.free(temporary)
    run.at("backward", "mlp")
    run.free(saved)
    assert {owner.line[:20]: owner.category for owner in attribute(run.events).at_peak if owner.line} == {
        "megatron/core/a.py:1": "activations",
        "megatron/core/b.py:1": "temporaries",
    }


def test_identities_share_a_block_and_the_last_word_counts() -> None:
    run = Events()
    run.begin(0, "build")
    buffer = run.alloc(10 * KIB, f"{MCORE}/distributed/param_and_grad_buffer.py")
    run.identify(buffer, Identity("buffers", "x.y", KIB))
    for name, size in (("a.0.weight", 4 * KIB), ("a.0.bias", KIB), ("a.1.weight", 4 * KIB), ("a.1.weight", 4 * KIB)):
        run.identify(buffer, Identity("parameters", name, size))
    run.begin(1, "forward")
    held = {(o.category, o.module, o.modules): size for o, size in attribute(run.events).at_peak.items() if size}
    assert held == {("parameters", "a.*", 2): 9 * KIB, ("parameters", "", 1): KIB}


def test_the_code_tells_logits_workspaces_and_communication_buffers() -> None:
    run = Events()
    run.begin(1, "forward")
    run.alloc(KIB, f"{MCORE}/pipeline_parallel/p2p_communication.py")
    run.at("forward", "output_layer")
    run.alloc(2 * KIB, f"{MCORE}/tensor_parallel/layers.py")
    gathered = run.alloc(4 * KIB, f"{MCORE}/tensor_parallel/mappings.py")
    run.free(gathered)
    run.at("forward", "GPTModel")
    run.alloc(8 * KIB, f"{MCORE}/fusions/fused_cross_entropy.py")
    run.at("forward", "linear")
    workspace = run.alloc(16 * KIB, f"{MCORE}/tensor_parallel/layers.py")
    run.metadata = WORKSPACES
    run.free(workspace)
    categories = {}
    for block, owner in zip(attribute(run.events).blocks, attribute(run.events).owners, strict=True):
        categories[block.size // KIB] = owner.category
    assert categories == {
        1: "communication buffers",
        2: "logits",
        4: "communication buffers",
        8: "logits",
        16: "workspaces",
    }


def test_a_thread_that_lags_behind_is_no_evidence_of_a_module() -> None:
    run = Events()
    run.begin(1, "backward")
    run.at("backward", "embedding")
    old = run.metadata
    run.begin(2, "backward")
    run.free(run.alloc(1))
    run.metadata = old
    run.alloc(KIB)
    assert next(iter(attribute(run.events).at_peak)) == Owner("unattributed", phase="backward")


def test_a_strangers_history_is_told_by_lines_and_called_unattributed() -> None:
    run = Events()
    kept = run.alloc(KIB, "/home/someone/train.py", 7, "main")
    run.free(run.alloc(KIB, "/usr/lib/python3/dist-packages/torch/nn/functional.py"))
    run.free(kept)
    run.free(2**50, 300)
    history = attribute(run.events)
    assert history.peak == 2 * KIB
    assert set(history.at_peak) - {Owner("rounding")} == {
        Owner("unattributed", "", "someone/train.py:7 (main)"),
        Owner("unattributed"),
    }
    assert attribute([]).peak == 0
    assert attribute([]).at_peak == {Owner("rounding"): 0}


def test_what_nothing_is_known_of_adds_up_too() -> None:
    run = Events()
    run.alloc(KIB)
    run.begin(1, "forward")
    run.metadata = ""
    run.alloc(2 * KIB)
    composition = attribute(run.events).composition([PhaseFigures(1, "forward", {"allocated": 4 * KIB}, {})])
    assert composition.categories(0)["unattributed"] == 4 * KIB
    assert sum(composition.at(0).values()) == 4 * KIB


def test_numbers_that_are_none_are_no_stamp() -> None:
    assert read_stamp("mbmem|\u00b2|1|forward|forward|") is None
    assert read_stamp(f"mbmem|{'9' * 5000}|1|forward|forward|") is None
    assert read_identity("mbmem-is|parameters|\u00b2|x") is None


def test_names_are_folded_and_lines_are_short() -> None:
    assert fold("decoder.layers.0.mlp.experts.linear_fc1.12") == "decoder.layers.*.mlp.experts.linear_fc1.*"
    assert fold("linear_fc1") == "linear_fc1"
    frames = [
        {"filename": "??", "line": 0, "name": "??"},
        {"filename": "/x/site-packages/torch/nn/modules/module.py", "line": 1, "name": "f"},
        {"filename": "/src/pytest_mbmem/megatron/stand_ins.py", "line": 9, "name": "<lambda>"},
        {"filename": "/src/Megatron-LM/megatron/core/transformer/mlp.py", "line": 44, "name": "forward"},
    ]
    assert line_of(frames) == "megatron/core/transformer/mlp.py:44 (forward)"
    assert line_of(frames[:3]) == ""


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5000)), max_size=60))
def test_owners_add_up_to_what_is_alive(operations: list[tuple[int, int]]) -> None:
    run = Events()
    run.begin(1, "forward")
    alive: list[tuple[int, int]] = []
    level = highest = at_highest = 0
    for choice, size in operations:
        if choice == 0 and alive:
            address, freed = alive.pop(size % len(alive))
            run.free(address)
            level -= -(-freed // 512) * 512
        elif choice == 3:
            run.begin(1, ("backward", "forward")[size % 2])
        else:
            run.at(("forward", "backward")[choice % 2], f"layers.{size % 3}")  # type: ignore[arg-type]
            alive.append((run.alloc(size, f"{MCORE}/f{size % 2}.py"), size))
            level += -(-size // 512) * 512
            if level > highest:
                highest, at_highest = level, sum(s for _, s in alive)
    history = attribute(run.events)
    held = history.at_peak
    assert history.peak == highest == sum(held.values())
    assert sum(s for owner, s in held.items() if owner.category != "rounding") == at_highest
    assert all(owner.category in CATEGORIES for owner in held)
