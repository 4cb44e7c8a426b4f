"""The known GPUs, and those of a user's file."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.virtual_gpu import environment
from pytest_mbmem.virtual_gpu.gpus import BUILT_IN, load_gpus

GIB = 2**30

OWN = """\
lab-gpu:
  name: Lab GPU 96GB
  capacity: 95 GiB
  context: 600 MiB
  nccl_per_communicator: 100 MiB
  compute_capability: "9.0"
  sm_count: 132
  threads_per_sm: 2048
  l2_cache: 50 MiB
  shared_memory_per_sm: 228 KiB
  shared_memory_per_block: 227 KiB
  bf16_tflops: 989
  memory_gb_per_s: 4000
"""


def test_the_usual_gpus_are_known():
    gpus = load_gpus()
    assert set(gpus) == {
        "a100-40gb",
        "a100-80gb",
        "h100-80gb",
        "h200-141gb",
        "b200-180gb",
        "gb200-186gb",
        "l4-24gb",
        "l40s-48gb",
    }
    for key, gpu in gpus.items():
        marketed = int(re.search(r"(\d+)gb", key)[1]) * 10**9
        assert gpu.key == key
        assert 0.9 * marketed < gpu.capacity < 1.08 * marketed  # 24 "GB" of memory are 24 GiB, less what is reserved
        assert gpu.usable == gpu.capacity - 512 * 2**20


def test_every_capacity_has_its_source():
    capacities = [line for line in BUILT_IN.read_text().splitlines() if line.strip().startswith("capacity:")]
    assert len(capacities) == len(load_gpus())
    assert all("#" in line for line in capacities)


def test_a_file_adds_gpus(tmp_path):
    (tmp_path / "gpus.yaml").write_text(OWN)
    gpus = load_gpus(tmp_path / "gpus.yaml")
    assert len(gpus) == len(load_gpus()) + 1
    gpu = gpus["lab-gpu"]
    assert (gpu.capacity, gpu.context_bytes, gpu.compute_capability) == (95 * GIB, 600 * 2**20, (9, 0))
    assert (gpu.bf16_tflops, gpu.memory_gb_per_s) == (989.0, 4000.0)
    assert gpu.nccl_per_communicator == 100 * 2**20


def test_a_gpu_may_be_like_another_but_for_some_keys(tmp_path):
    path = tmp_path / "gpus.yaml"
    path.write_text("ours: {like: h200-141gb, capacity: 100 GiB, nccl_per_communicator: 0 B}\n")
    gpus = load_gpus(path)
    assert gpus["ours"] == replace(gpus["h200-141gb"], key="ours", capacity=100 * GIB, nccl_per_communicator=0)


def test_assumptions_of_a_built_in_gpu_may_be_stated_anew(tmp_path):
    path = tmp_path / "gpus.yaml"
    path.write_text("h100-80gb: {like: h100-80gb, context: 1 GiB, nccl_per_communicator: 2 GiB}\n")
    mine, built_in = load_gpus(path)["h100-80gb"], load_gpus()["h100-80gb"]
    assert mine == replace(built_in, context_bytes=GIB, nccl_per_communicator=2 * GIB)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100-80gb: {like: h100-80gb, capacity: 70 GiB}", "1: h100-80gb: is built in; give your GPU another name, or"),
        ("h100-80gb: {like: a100-80gb}", "1: h100-80gb: is built in; give your GPU another name"),
        ("ours: {like: h101}", "1: ours.like: 'h101' is not one of a100-40gb, a100-80gb, h100-80gb"),
        ("ours: {like: [h100-80gb]}", "1: ours.like: ['h100-80gb'] is not one of a100-40gb"),
        ("ours: {lik: h100-80gb}", "1: ours.lik: unknown key (did you mean like?)"),
        ("ours: {like: h100-80gb, nccl_per_communicator: lots}", "1: ours.nccl_per_communicator: 'lots' is not a size"),
        (
            "ours: {like: h100-80gb, context: 90 GiB}",
            "1: ours.context: 96636764160 bytes leave nothing of the capacity",
        ),
        ("ours: {name: X}", "1: ours: lacks capacity, context, compute_capability, "),
    ],
)
def test_what_is_wrong_in_an_entry_that_is_like_another_is_named(tmp_path, text, message):
    path = tmp_path / "gpus.yaml"
    path.write_text(text + "\n")
    with pytest.raises(UserError, match="^" + re.escape(f"{path}:{message}")):
        load_gpus(path)


def test_every_estimate_for_nccl_has_its_arithmetic():
    text = BUILT_IN.read_text()
    assert "16 x 2 x 4 MiB\n" in text
    assert "2 x 2 x 4 MiB." in text
    mib = {key: gpu.nccl_per_communicator // 2**20 for key, gpu in load_gpus().items()}
    assert {key for key, size in mib.items() if size == 2 * 2 * 4} == {"l4-24gb", "l40s-48gb"}  # on PCIe
    assert {size for key, size in mib.items() if not key.startswith("l4")} == {16 * 2 * 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("capacity: 95 GiB", "capacity: 95"), r":3: lab-gpu\.capacity: 95 is out of range"),
        (("capacity: 95 GiB", "capacity: 95 gigs"), r":3: lab-gpu\.capacity: '95 gigs' is not a size"),
        (("capacity: 95 GiB", "capacity: 2 TiB"), r":3: lab-gpu\.capacity: '2 TiB' is out of range"),
        (("context: 600 MiB", "context: 96 GiB"), r":4: lab-gpu\.context: .* leave nothing of the capacity"),
        (("  capacity: 95 GiB\n", ""), r":1: lab-gpu: lacks capacity"),
        (("sm_count: 132", "sm_counts: 132"), r":7: lab-gpu\.sm_counts: unknown key \(did you mean sm_count\?\)"),
        (("sm_count: 132", "sm_count: true"), r":7: lab-gpu\.sm_count: True is not a whole number from 1 to 1024"),
        (("sm_count: 132", "sm_count: 0"), r":7: lab-gpu\.sm_count: 0 is not a whole number"),
        (('"9.0"', "9.0"), r":6: lab-gpu\.compute_capability: 9\.0 is not a compute capability; .* in quotes"),
        (('"9.0"', '"3.5"'), r":6: lab-gpu\.compute_capability: '3\.5' is not a compute capability"),
        (("Lab GPU 96GB", '""'), r":2: lab-gpu\.name: '' is not a text"),
        (("bf16_tflops: 989", "bf16_tflops: .nan"), r":12: lab-gpu\.bf16_tflops: nan is not a number above 0"),
        (("lab-gpu:", "Lab GPU:"), r":1: Lab GPU: a GPU's name is made of lower-case letters"),
        (("lab-gpu:", "h100-80gb:"), r":1: h100-80gb: is built in; give your GPU another name"),
        (("  sm_count: 132", "  sm_count: 132\n  sm_count: 133"), r":8: lab-gpu\.sm_count: given twice"),
        ((OWN, "- 1\n"), r"must hold GPUs by name, each with the keys name, capacity"),
        ((OWN, "lab-gpu: 80 GiB\n"), r":1: lab-gpu: '80 GiB' is not a GPU"),
        ((OWN, "lab-gpu: [\n"), r"not valid YAML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, change, message):
    path = tmp_path / "gpus.yaml"
    path.write_text(OWN.replace(*change))
    with pytest.raises(UserError, match=re.escape(str(path)) + ".*" + message):
        load_gpus(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml: cannot be read"):
        load_gpus(tmp_path / "none.yaml")


def test_the_environment_describes_the_gpu():
    gpu = load_gpus()["a100-40gb"]
    described = environment(gpu, 2)
    assert described["MBMEM_GPU_CAPACITY"] == str(gpu.capacity)
    assert described["MBMEM_GPU_COUNT"] == "2"
    assert described["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert described["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


@pytest.mark.parametrize("count", [0, 17])
def test_how_many_gpus_a_process_can_have(count):
    with pytest.raises(UserError, match=f"{count} virtual GPUs in one process: 1 to 16 are possible"):
        environment(load_gpus()["a100-40gb"], count)
