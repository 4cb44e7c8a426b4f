"""Whether an installed Transformer Engine can be used, and which recipes are refused for it before anything runs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.growth import GrowthRule
from pytest_mbmem.measure import workers
from pytest_mbmem.measure.growth_runs import measure_growth
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measure.workers import Workers
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.te import installation
from pytest_mbmem.te.installation import Installation, check
from pytest_mbmem.virtual_gpu.build import Torch
from pytest_mbmem.virtual_gpu.gpus import load_gpus

compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(compiler is None, reason="needs a C compiler")


# What is installed ----------------------------------------------------------------------------------------------------


class Packages:
    """Installed packages that are made up, in a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.versions = dict.fromkeys(
            ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch"), "2.14.0"
        )
        self.libraries = folder / "transformer_engine" / "wheel_lib"
        self.libraries.mkdir(parents=True)
        (folder / "torch" / "lib").mkdir(parents=True)
        monkeypatch.setattr(
            installation, "versions_of", lambda names: {n: self.versions[n] for n in names if n in self.versions}
        )
        monkeypatch.setattr(
            installation, "package_folder", lambda name: (folder / name) if (folder / name).exists() else None
        )
        monkeypatch.setattr(installation, "find_torch", lambda: Torch(folder / "torch", "2.14.1+cu130", "13.0"))
        monkeypatch.setattr(installation.sysconfig, "get_paths", lambda: {"purelib": str(folder)})
        installation.find.cache_clear()

    @property
    def problem(self) -> str | None:
        installation.find.cache_clear()
        found = installation.find()
        assert found is not None
        return found.problem

    def compile(self, library: Path, source: str, *links: Path) -> Path:
        (self.folder / "source.c").write_text(source)
        command = [str(compiler), "-shared", "-fPIC", "-Wl,--no-as-needed", f"-Wl,-soname,{library.name}"]
        subprocess.run([*command, str(self.folder / "source.c"), *map(str, links), "-o", str(library)], check=True)
        return library

    def kernels(self, cudart: str = "libcudart.so.13") -> None:
        runtime = self.compile(self.folder / cudart, "int cudaMalloc(void) { return 0; }")
        self.compile(self.libraries / "libtransformer_engine.so", "int x;", runtime)

    def extension(self, calls: str = "_ZN2at5emptyEv", suffix: str = EXTENSION_SUFFIXES[0]) -> Path:
        return self.compile(
            self.libraries / f"transformer_engine_torch{suffix}",
            f"int {calls}(void); int use(void) {{ return {calls}(); }}",
        )


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    """A Transformer Engine that fits the torch beside it."""
    made = Packages(tmp_path, monkeypatch)
    made.compile(tmp_path / "torch" / "lib" / "libtorch.so", "int _ZN2at5emptyEv(void) { return 0; }")
    made.kernels()
    made.extension()
    yield made
    installation.find.cache_clear()  # other tests ask for the real one


@needs_compiler
def test_one_that_fits(packages: Packages) -> None:
    assert packages.problem is None
    (packages.libraries / "libtransformer_engine.so").rename(packages.folder / "libtransformer_engine.so")
    assert packages.problem is None  # as an editable build has it


@needs_compiler
def test_one_that_was_built_from_source_as_a_whole(packages: Packages) -> None:
    packages.versions = {"transformer-engine": "2.14.0+abc"}
    assert packages.problem is None


@needs_compiler
def test_none(packages: Packages) -> None:
    packages.versions = {}
    shutil.rmtree(packages.folder / "transformer_engine")
    installation.find.cache_clear()
    assert installation.find() is None
    assert installation.problem() == ""


@needs_compiler
def test_what_an_uninstallation_left(packages: Packages) -> None:
    packages.versions = {}
    said = packages.problem
    assert said is not None
    assert "transformer_engine is there and the package transformer-engine is not: install it anew with" in said
    assert installation.problem() == said


@needs_compiler
@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("transformer-engine", "2.9.0", "Transformer Engine 2.9.0 is installed, and recipes are measured from 2.10 on"),
        (
            "transformer-engine-torch",
            "2.13.0",
            "transformer-engine 2.14.0 and transformer-engine-torch 2.13.0 are inst",
        ),
        (
            "transformer-engine-cu13",
            "2.20.2",
            "transformer-engine 2.14.0 and transformer-engine-cu13 2.20.2 are installed",
        ),
        (
            "transformer-engine-cu12",
            "2.13.0",
            "transformer-engine 2.14.0 and transformer-engine-cu12 2.13.0 are installed",
        ),
    ],
    ids=["old", "extension", "kernels", "kernels-of-another-cuda"],
)
def test_versions_that_do_not_match(packages: Packages, name: str, version: str, said: str) -> None:
    packages.versions[name] = version
    assert packages.problem is not None
    assert packages.problem.startswith(said)
    assert packages.problem.endswith("install it anew with 'python -m pytest_mbmem.te.install', or uninstall it")


@needs_compiler
def test_missing_parts(packages: Packages) -> None:
    (extension,) = packages.libraries.glob("transformer_engine_torch*")
    content = extension.read_bytes()
    extension.unlink()
    assert (packages.problem or "").startswith(
        "Transformer Engine 2.14.0 is installed without its extension for torch:"
    )
    extension.write_bytes(content)
    (packages.libraries / "libtransformer_engine.so").unlink()
    assert (packages.problem or "").startswith("Transformer Engine 2.14.0 is installed without its library of kernels:")


@needs_compiler
def test_parts_that_are_there_twice(packages: Packages) -> None:
    shutil.copy(packages.libraries / "libtransformer_engine.so", packages.folder)
    assert "are both there" in (packages.problem or "")


@needs_compiler
def test_kernels_for_another_cuda(packages: Packages) -> None:
    packages.kernels("libcudart.so.12")
    said = "libtransformer_engine.so was built for CUDA 12, and torch 2.14.1+cu130 for CUDA 13.0:"
    assert said in (packages.problem or "")


@needs_compiler
def test_an_extension_for_another_torch(packages: Packages) -> None:
    packages.extension("_ZNK3c1010TensorImpl4goneEv")
    said = "was built for another torch than 2.14.1+cu130, which lacks _ZNK3c1010TensorImpl4goneEv:"
    assert said in (packages.problem or "")


@needs_compiler
def test_an_extension_for_another_python(packages: Packages) -> None:
    next(packages.libraries.glob("transformer_engine_torch*")).unlink()
    packages.extension(suffix=".cpython-27-x86_64-linux-gnu.so")
    assert "cpython-27-x86_64-linux-gnu.so was built for another Python than 3." in (packages.problem or "")


@needs_compiler
def test_a_damaged_extension(packages: Packages) -> None:
    (extension,) = packages.libraries.glob("transformer_engine_torch*")
    extension.write_bytes(extension.read_bytes()[:500])
    assert (packages.problem or "").startswith(f"{extension}: ")


# Recipes --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The installation that the test's parameter says."""
    monkeypatch.setattr(installation, "find", lambda: request.param)


NONE, FITS, BROKEN = None, Installation("2.14.0", None), Installation("2.14.0", "it is damaged")
with_each = pytest.mark.parametrize("installed", [NONE, FITS, BROKEN], indirect=True, ids=["none", "fits", "broken"])
without = pytest.mark.parametrize("installed", [NONE], indirect=True, ids=["none"])
with_broken = pytest.mark.parametrize("installed", [BROKEN], indirect=True, ids=["broken"])
OURS = {"transformer_impl": "transformer_engine"}


@with_each
@pytest.mark.parametrize("virtual", [True, False], ids=["virtual", "real"])
def test_local_layers_need_none(installed: None, small_recipe: Recipe, virtual: bool) -> None:
    check(small_recipe, virtual=virtual)


@with_broken
@pytest.mark.parametrize("virtual", [True, False], ids=["virtual", "real"])
def test_one_that_cannot_be_used_is_refused(installed: None, small_recipe: Recipe, virtual: bool) -> None:
    with pytest.raises(UserError, match=r"^training\.transformer_impl: 'transformer_engine' .*: it is damaged$"):
        check(small_recipe.but(**OURS), virtual=virtual)


@pytest.mark.parametrize("installed", [FITS], indirect=True, ids=["fits"])
@pytest.mark.parametrize("backend", ["unfused", "flash", "fused", "auto"])
def test_with_one_that_fits_all_is_possible(installed: None, small_recipe: Recipe, backend: str) -> None:
    for virtual in (True, False):
        check(small_recipe.but(**OURS, attention_backend=backend), virtual=virtual)


@without
@pytest.mark.parametrize("backend", ["unfused", "flash"])
def test_without_one_a_virtual_gpu_has_equivalents(installed: None, small_recipe: Recipe, backend: str) -> None:
    check(small_recipe.but(**OURS, attention_backend=backend), virtual=True)
    with pytest.raises(UserError, match="on a real GPU needs Transformer Engine, which is not installed: 'python -m "):
        check(small_recipe.but(**OURS, attention_backend=backend), virtual=False)


@without
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"attention_backend": "fused"},
            r"^training\.attention_backend: 'fused' needs Transformer Engine, which is not",
        ),
        ({"attention_backend": "auto"}, r"^training\.attention_backend: 'auto' needs Transformer Engine, which is not"),
        ({"megatron": {"fp8": "hybrid"}}, r"^megatron\.fp8: 'hybrid' needs Transformer Engine, which is not installed"),
    ],
    ids=["fused", "auto", "fp8"],
)
def test_what_has_no_equivalent_is_refused(
    installed: None, small_recipe: Recipe, change: dict[str, object], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        check(small_recipe.but(**OURS, **change), virtual=True)


@with_broken
def test_refused_before_a_worker_starts(installed: None, small_recipe: Recipe) -> None:
    launcher = Launcher(load_gpus()["h100-80gb"])
    for measure in (launcher.measure, lambda recipe: measure_growth(launcher, recipe, GrowthRule())):
        with pytest.raises(UserError, match="it is damaged"):
            measure(small_recipe.but(**OURS))
    assert launcher._server is None


@with_broken
def test_megatron_that_cannot_import_it_says_what_is_wrong(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_START_SERVER", "raise AssertionError('mismatch')")
    said = "could not start \\(megatron-core imports Transformer Engine where it is installed: it is damaged\\):\n"
    with pytest.raises(UserError, match=f"{said}AssertionError: mismatch$"):
        Workers().call("os:getpid", {})
