"""Building the driver: what is built, how it is kept, and what is said when it cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.virtual_gpu import build
from pytest_mbmem.virtual_gpu.build import Stub, ensure_driver, stubs_for
from pytest_mbmem.virtual_gpu.elf import Needs, Wanted

# --- which libraries ------------------------------------------------------------------------------------------------


def wanted(library: str, *symbols: str) -> tuple[Wanted, ...]:
    return tuple(Wanted(symbol, library, library) for symbol in symbols)


@pytest.mark.parametrize(
    ("cudart", "cublas", "cufft", "cusolver"),
    [
        ("libcudart.so.12", "libcublas.so.12", "libcufft.so.11", "libcusolver.so.11"),
        ("libcudart.so.13", "libcublas.so.13", "libcufft.so.12", "libcusolver.so.12"),
    ],
)
def test_libraries_are_named_as_torch_asks_for_them(cudart, cublas, cufft, cusolver):
    needs = Needs(
        ("libc.so.6", "libtorch_cpu.so", "libcurand.so.10", cudart, cublas, cufft, "libnccl.so.2", "libcurl.so.4"),
        (*wanted(cudart, "cudaMalloc"), *wanted(cublas, "cublasCreate_v2"), *wanted("libc.so.6", "malloc")),
    )
    solver = Needs((cusolver,), wanted(cusolver, "cusolverDnCreate"))
    stubs = {stub.soname: stub for stub in stubs_for([needs, solver])}
    assert set(stubs) == {
        cudart,
        cublas,
        cufft,
        cusolver,
        "libcurand.so.10",
        "libnccl.so.2",
        "libcuda.so.1",  # opened by name, so always there
        "libnvidia-ml.so.1",
    }
    assert stubs[cudart].symbols[cudart] == {"cudaMalloc"}
    assert stubs[cudart].name == "cudart"
    assert stubs[cudart].version_script() == f"{cudart} {{ global: *; }};\n"
    assert stubs["libcuda.so.1"].version_script() is None


def test_unversioned_symbols_go_to_the_library_whose_prefix_they_have():
    libraries = ("libnccl.so.2", "libcufile.so.0", "libcusparse.so.12", "libcusparseLt.so.0", "libcudart.so.13")
    names = (
        "ncclSend",
        "cuFileRead",
        "cusparseLtInit",
        "cuCtxGetCurrent",
        "nvmlInit_v2",
        "_ZN3c105Error",
        "currentTime",
    )
    stubs = stubs_for([Needs(libraries, tuple(map(Wanted, names)))])
    owner = {symbol: stub.soname for stub in stubs for symbols in stub.symbols.values() for symbol in symbols}
    assert owner == {
        "ncclSend": "libnccl.so.2",
        "cuFileRead": "libcufile.so.0",
        "cusparseLtInit": "libcusparseLt.so.0",
        "cuCtxGetCurrent": "libcuda.so.1",
        "nvmlInit_v2": "libnvidia-ml.so.1",
    }


def test_a_version_name_may_differ_from_the_librarys():
    stub = Stub(
        "libnvshmem_host.so.3", {"NVSHMEM": frozenset({"nvshmem_ptr", "nvshmem_free"}), "OLD": frozenset({"x"})}
    )
    assert stub.version_script() == "NVSHMEM { global: *; };\nOLD { global: x; };\n"
    assert "long nvshmem_ptr(void) { return 0; }" in stub.generated(0)


def test_every_symbol_that_torch_takes_from_nvidia_is_in_the_driver(driver):
    stubs = stubs_for([build.read_needs(path) for path in build._shared_libraries()])
    assert sum(len(names) for stub in stubs for names in stub.symbols.values()) > 500
    script = "import ctypes, json, sys\nlibraries = json.load(sys.stdin)\n"
    script += "print([n for p, names in libraries for n in names if not hasattr(ctypes.CDLL(p), n)])"
    folder = driver.libraries[0].parent
    libraries = [[str(folder / s.soname), sorted(set().union(*s.symbols.values()))] for s in stubs]
    missing = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(libraries),
        env={**os.environ, "LD_PRELOAD": driver.preload},
        capture_output=True,
        text=True,
        check=True,
    )
    assert missing.stdout.strip() == "[]"


def test_the_sources_compile_without_warnings(driver, monkeypatch, tmp_path):
    # -w of the real build, which must not fail on a stranger's compiler, is turned around
    compiler = [*build.find_compiler(), "-Wall", "-Wextra", "-Werror"]
    real_run = subprocess.run

    def run(command, **options):
        return real_run([argument for argument in command if argument != "-w"], **options)

    monkeypatch.setattr(build.subprocess, "run", run)
    names = build.build(tmp_path, compiler)
    assert all((tmp_path / name).is_file() for name in names)


def test_a_damaged_library_is_named(tmp_path, driver, monkeypatch):
    (tmp_path / "transformer_engine_torch.so").write_bytes(b"\x7fELF\x02\x01")
    monkeypatch.setattr(build, "_shared_libraries", lambda: [tmp_path / "transformer_engine_torch.so"])
    with pytest.raises(
        UserError, match=r"transformer_engine_torch\.so: .*; install the package that it belongs to anew"
    ):
        ensure_driver(tmp_path / "cache")


@pytest.mark.parametrize(("version", "old"), [("2.10.0", True), ("2.11.0", False), (None, False)])
def test_libraries_are_found_where_transformer_engine_looks(driver, monkeypatch, version, old):
    monkeypatch.setattr(build, "versions_of", lambda names: {} if version is None else {"transformer-engine": version})
    folder = str(driver.libraries[0].parent)
    assert {name for name, value in driver.environment.items() if value == folder} == {
        *build.LIBRARY_FOLDERS,
        *([build.OLD_LIBRARY_FOLDER] if old else []),
    }


# --- the cache ------------------------------------------------------------------------------------------------------


@pytest.fixture
def forbid_building(monkeypatch):
    def fail(*_: object) -> None:
        pytest.fail("built again")

    def forbid() -> None:
        monkeypatch.setattr(build, "build", fail)

    return forbid


def test_a_built_driver_is_used_again(driver, forbid_building):
    forbid_building()
    again = ensure_driver(driver.libraries[0].parent.parent)
    assert again == driver
    assert driver.preload.split(":")[0].endswith("libvirtual_gpu.so")
    assert all(path.is_absolute() and path.is_file() for path in driver.libraries)


@pytest.mark.parametrize("damage", ["truncated library", "missing library", "broken manifest", "no manifest"])
def test_a_damaged_driver_is_built_again(tmp_path, driver, damage):
    first = ensure_driver(tmp_path)
    library, manifest = first.libraries[3], first.libraries[0].parent / build.MANIFEST
    whole = library.read_bytes()
    if damage == "truncated library":
        library.write_bytes(whole[:1000])
    elif damage == "missing library":
        library.unlink()
    elif damage == "broken manifest":
        manifest.write_text('{"libcuda.so.1": ')
    else:
        manifest.unlink()
    assert ensure_driver(tmp_path) == first
    assert len(library.read_bytes()) == len(whole)
    assert {p.name for p in tmp_path.iterdir()} == {".lock", manifest.parent.name}  # nothing is left lying about


def test_what_a_killed_build_left_is_removed(tmp_path, driver):
    (tmp_path / ".building-1").mkdir()
    (tmp_path / ".building-1" / "libcuda.so.1").write_text("")
    ensure_driver(tmp_path)
    assert not (tmp_path / ".building-1").exists()


def test_another_torch_or_source_has_a_driver_of_its_own(tmp_path, driver, monkeypatch):
    torch = build.find_torch()
    compiler = build.find_compiler()
    known = build._fingerprint(torch, compiler)
    assert build._fingerprint(torch, [*compiler, "-O2"]) != known
    assert build._fingerprint(build.Torch(torch.folder, "0.0", torch.cuda), compiler) != known
    (tmp_path / "new.c").write_text("")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build._fingerprint(torch, compiler) != known


def test_concurrent_builds_agree(tmp_path, driver):
    script = (
        "import sys; from pathlib import Path; from pytest_mbmem.virtual_gpu.build import ensure_driver; "
        "print(ensure_driver(Path(sys.argv[1])).preload); assert 'torch' not in sys.modules"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    answers = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert len(answers) == 1
    assert build._load(Path(answers.pop().split(":")[0]).parent) is not None
    assert len(list(tmp_path.iterdir())) == 2  # the driver and the lock


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.default_cache() == tmp_path / "pytest-mbmem" / "driver"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.default_cache() == tmp_path / ".cache" / "pytest-mbmem" / "driver"


# --- what is missing ------------------------------------------------------------------------------------------------


def test_without_linux(monkeypatch):
    monkeypatch.setattr(build.sys, "platform", "darwin")
    with pytest.raises(UserError, match=r"needs Linux \(this is darwin\)"):
        ensure_driver()


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """Packages that are found in tmp_path and nowhere else."""

    def find(name: str) -> Path | None:
        return tmp_path / name if (tmp_path / name).exists() else None

    monkeypatch.setattr(build, "package_folder", find)
    return tmp_path


def test_without_torch(packages):
    with pytest.raises(UserError, match="torch is not installed: install one with 'pip install torch'"):
        ensure_driver()


def test_with_a_cpu_build_of_torch(packages):
    (packages / "torch" / "lib").mkdir(parents=True)
    (packages / "torch" / "version.py").write_text("__version__ = '2.13.0+cpu'\n")
    with pytest.raises(UserError, match=r"needs a CUDA build of torch, and torch 2\.13\.0\+cpu in .*torch is none"):
        ensure_driver()


def test_without_a_compiler(driver, monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs a C compiler .* install gcc, or run 'pip install ziglang'"):
        build.find_compiler()


def test_ziglang_stands_in_for_a_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: object())
    assert build.find_compiler() == [sys.executable, "-m", "ziglang", "cc"]


def test_a_compiler_of_ones_own_must_exist(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(UserError, match="CC=no-such-compiler -m64: there is no such C compiler"):
        build.find_compiler()


def test_a_compiler_that_fails_is_quoted(driver, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "false")
    with pytest.raises(UserError, match="the virtual GPU's driver did not compile: 'false "):
        ensure_driver(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


@pytest.fixture
def headers_in(monkeypatch, tmp_path):
    """A folder that is the only place with CUDA's headers, as a toolkit."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(build, "SYSTEM_TOOLKIT", tmp_path)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    return tmp_path / "include"


def test_without_headers(headers_in):
    with pytest.raises(UserError, match=r"there are no CUDA 12 headers .* run 'pip install nvidia-cuda-runtime-cu12'"):
        build.find_headers(12)
    with pytest.raises(UserError, match=r"there are no CUDA 13 headers .* run 'pip install nvidia-cuda-runtime'"):
        build.find_headers(13)


def write_headers(folder: Path, version: int) -> None:
    folder.mkdir(parents=True)
    (folder / "cuda.h").write_text("")
    (folder / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")


def test_headers_must_be_of_torchs_cuda_version(headers_in):
    write_headers(headers_in, 12080)
    (headers_in / "crt").mkdir()
    (headers_in / "crt" / "host_defines.h").write_text("")
    assert build.find_headers(12) == build.Headers((headers_in,), 12080)
    with pytest.raises(UserError, match="no CUDA 13 headers"):
        build.find_headers(13)


def test_headers_without_crt_ask_for_triton(headers_in):
    write_headers(headers_in, 13000)
    with pytest.raises(UserError, match=r"lack crt/host_defines\.h.*'pip install triton'"):
        build.find_headers(13)


def test_a_cache_that_cannot_be_written(driver, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/cache: cannot keep the virtual GPU's driver there .* XDG_CACHE_HOME"):
        ensure_driver(tmp_path / "file" / "cache")


def test_a_path_that_ld_preload_cannot_hold(driver, tmp_path):
    with pytest.raises(UserError, match="LD_PRELOAD takes no path with spaces or colons"):
        ensure_driver(tmp_path / "my cache")
    assert list(tmp_path.iterdir()) == []
