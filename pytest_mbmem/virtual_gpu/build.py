"""Builds the driver of the virtual GPU for the torch that is installed, and keeps it in the user's cache folder.

torch's libraries say in their own ELF tables which NVIDIA libraries and symbols they want. For each of those libraries
one is compiled here under the same name: from `driver/<name>.c` where real answers are needed, the rest generated. In
front of torch with LD_PRELOAD they take the place of NVIDIA's. torch itself is never imported here.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..installed import versions_of
from . import elf
from .elf import Needs, read_needs

SOURCES = Path(__file__).parent / "driver"
SYSTEM_TOOLKIT = Path("/usr/local/cuda")

# What a generated function returns. Success by default (a matrix product that nobody computed is still a success), but
# "not supported", as each library numbers it, where a function would have to answer with a value.
UNANSWERED = {
    "cudart": 801,  # cudaErrorNotSupported
    "cuda": 801,  # CUDA_ERROR_NOT_SUPPORTED
    "nvidia-ml": 3,  # NVML_ERROR_NOT_SUPPORTED
    "cudnn": 3000,  # CUDNN_STATUS_NOT_SUPPORTED
    "cusolver": 9,  # CUSOLVER_STATUS_NOT_SUPPORTED
    "cusparse": 10,  # CUSPARSE_STATUS_NOT_SUPPORTED
    "cusparseLt": 10,
    "cufft": 16,  # CUFFT_NOT_SUPPORTED
    "cufile": 5001,  # CU_FILE_DRIVER_NOT_INITIALIZED
    "cupti": 27,  # CUPTI_ERROR_NOT_SUPPORTED
    "nccl": 5,  # ncclInvalidUsage
}

# Asked for what may be missing on any machine, so their refusal is no news.
SILENT = ("nvidia-ml", "cupti")

# torch and what is built on it; the packages whose libraries say what the driver must offer.
PACKAGES = ("torch", "transformer_engine")

# Where Transformer Engine (2.11 to 2.20) looks for a library, and Triton for libcuda.
LIBRARY_FOLDERS = ("CUDNN_HOME", "NVRTC_HOME", "CURAND_HOME", "TRITON_LIBCUDA_PATH")

# Where Transformer Engine 2.10 looks for NVRTC and cuRAND; CUDA 13's pip packages it does not find at all.
OLD_LIBRARY_FOLDER = "CUDA_HOME"


@dataclass(frozen=True)
class Driver:
    """A built driver: the libraries to put in front of torch's."""

    libraries: tuple[Path, ...]

    @property
    def preload(self) -> str:
        """The value of LD_PRELOAD."""
        return ":".join(map(str, self.libraries))

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a process that runs on it."""
        # Transformer Engine and Triton look for these libraries in files, and take the first of these folders.
        is_old = versions_of(["transformer-engine"]).get("transformer-engine", "").startswith("2.10.")
        names = (*LIBRARY_FOLDERS, OLD_LIBRARY_FOLDER) if is_old else LIBRARY_FOLDERS
        return {"LD_PRELOAD": self.preload, **dict.fromkeys(names, str(self.libraries[0].parent))}


@dataclass(frozen=True)
class Torch:
    """The installed torch, as far as it is known without importing it."""

    folder: Path
    version: str
    cuda: str  # "13.0": what it was built with


@dataclass(frozen=True)
class Headers:
    """The CUDA headers to compile against."""

    folders: tuple[Path, ...]
    version: int  # CUDART_VERSION: 13000 is CUDA 13.0


def ensure_driver(cache: Path | None = None) -> Driver:
    """The driver for the installed torch, built when it is not in the cache or is damaged there.

    `cache` defaults to `$XDG_CACHE_HOME/pytest-mbmem/driver` or `~/.cache/pytest-mbmem/driver`. Several processes may
    call this at once: one builds, the others wait. Raises `UserError` when this machine cannot have a driver.
    """
    if sys.platform != "linux":
        raise UserError(f"the virtual GPU needs Linux (this is {sys.platform}): torch's CUDA build exists only there")
    torch = find_torch()
    compiler = find_compiler()
    cache = cache if cache is not None else default_cache()
    folder = cache.absolute() / f"torch-{torch.version}-{_fingerprint(torch, compiler)}"
    if re.search(r"[\s:]", str(folder)):
        raise UserError(
            f"{folder}: LD_PRELOAD takes no path with spaces or colons; set XDG_CACHE_HOME to another folder"
        )
    driver = _load(folder)
    if driver is not None:
        return driver
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent / ".lock"):
            return _load(folder) or _build_into(folder, torch, compiler)
    except OSError as error:
        raise UserError(
            f"{folder.parent}: cannot keep the virtual GPU's driver there ({error.strerror or error}); "
            "make the folder writable or set XDG_CACHE_HOME to another one"
        ) from None


def default_cache() -> Path:
    """The folder of this user's built drivers."""
    return cache_folder("driver")


def cache_folder(name: str) -> Path:
    """Of this user, for what is built on this machine and can be built again."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "pytest-mbmem" / name


# --- what is installed ------------------------------------------------------------------------------------------------


def find_torch() -> Torch:
    """The installed CUDA build of torch. Raises `UserError` when there is none."""
    folder = package_folder("torch")
    install = "install one with 'pip install torch' on Linux, without a '+cpu' index"
    if folder is None:
        raise UserError(f"the virtual GPU needs a CUDA build of torch, and torch is not installed: {install}")
    text = (folder / "version.py").read_text()
    version, cuda = (
        match.group(1) if (match := re.search(rf"^{name}\b.*=\s*['\"]([^'\"]+)", text, re.M)) else "unknown"
        for name in ("__version__", "cuda")
    )
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        raise UserError(
            f"the virtual GPU needs a CUDA build of torch, and torch {version} in {folder} is none: {install}"
        )
    return Torch(folder, version, cuda)


def find_compiler() -> list[str]:
    """The command of a C compiler: $CC, cc, gcc, clang, or the one in the pip package ziglang."""
    own = os.environ.get("CC", "").strip()
    if own:
        command = shlex.split(own)
        if shutil.which(command[0]) is None:
            raise UserError(f"CC={own}: there is no such C compiler")
        return command
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path is not None:
            return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise UserError(
        "the virtual GPU needs a C compiler to build its driver once, and there is none "
        "(looked for $CC, cc, gcc, clang, ziglang): install gcc, or run 'pip install ziglang'"
    )


def find_headers(cuda_major: int) -> Headers:
    """CUDA's headers: from the pip packages that torch depends on, or from a CUDA toolkit."""
    candidates: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for root in map(Path, spec.submodule_search_locations or [] if spec else []):
        candidates += [root / f"cu{cuda_major}" / "include", root / "cuda_runtime" / "include"]
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), str(SYSTEM_TOOLKIT)]
    candidates += [Path(toolkit) / "include" for toolkit in toolkits if toolkit]
    for folder in candidates:
        version = _cudart_version(folder)
        if version is None or version // 1000 != cuda_major:
            continue
        # NVIDIA's runtime package leaves out the folder crt/, which Triton's and a toolkit's headers have
        triton = package_folder("triton")
        crt = [folder, *([triton / "backends" / "nvidia" / "include"] if triton else []), *candidates]
        for other in crt:
            if (other / "crt" / "host_defines.h").exists():
                return Headers(tuple(dict.fromkeys((folder, other))), version)
        raise UserError(
            f"{folder}: the CUDA headers lack crt/host_defines.h, needed to build the virtual GPU's driver: "
            "run 'pip install triton', which torch depends on"
        )
    package = "nvidia-cuda-runtime" if cuda_major >= 13 else f"nvidia-cuda-runtime-cu{cuda_major}"
    raise UserError(
        f"there are no CUDA {cuda_major} headers (cuda_runtime_api.h) to build the virtual GPU's driver with: "
        f"run 'pip install {package}', which torch depends on"
    )


def _cudart_version(include: Path) -> int | None:
    try:
        text = (include / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return int(match.group(1)) if match and (include / "cuda.h").exists() else None


def package_folder(name: str) -> Path | None:
    """Where an installed package is; it is not imported."""
    spec = importlib.util.find_spec(name)
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def _shared_libraries() -> list[Path]:
    """The libraries that want something of NVIDIA's."""
    found: list[Path] = []
    for name in PACKAGES:
        folder = package_folder(name)
        if folder is not None:
            found += folder.rglob("*.so") if name != "torch" else [*(folder / "lib").glob("*.so"), *folder.glob("*.so")]
            found += folder.parent.glob(f"{name}_*.so")
    return sorted(found)


def _library_versions(cuda_version: int) -> dict[str, int]:
    """What the libraries say of themselves: the versions that pip installed beside torch, or that torch asks for."""
    major, minor = cuda_version // 1000, cuda_version % 1000 // 10
    asked = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("torch") or []:
            match = re.match(r"([\w.-]+)==([\d.]+)", requirement)
            if match:
                asked[match.group(1)] = match.group(2)

    def version(package: str, fallback: str) -> int:
        text = asked.get(package, fallback)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            text = importlib.metadata.version(package)
        first, second, third = (*map(int, text.split(".")[:3]), 0, 0)[:3]
        return first * 10000 + second * 100 + third

    return {
        "CUDA_MAJOR": major,
        "CUDA_MINOR": minor,
        "CUBLAS_VERSION": version("nvidia-cublas" if major >= 13 else f"nvidia-cublas-cu{major}", f"{major}.{minor}"),
        "CUDNN_VERSION": version(f"nvidia-cudnn-cu{major}", "9.10"),
        "NCCL_VERSION": version(f"nvidia-nccl-cu{major}", "2.27"),
        # cupti.h counts its versions by CUDA's: 130000 in 13.0
        "CUPTI_VERSION": major * 10000 + minor * 100,
    }


# --- which libraries, which symbols -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stub:
    """One library to build."""

    soname: str  # "libcublas.so.13"
    symbols: Mapping[str, frozenset[str]]  # by version name; "" for an unversioned library

    @property
    def name(self) -> str:
        """ "cublas": without what varies."""
        return re.sub(r"^lib|\.so.*$", "", self.soname)

    def generated(self, result: int) -> str:
        """C source that defines every wanted symbol, weakly: an answer in `driver/<name>.c` takes precedence.

        A function that refuses says so once on stderr: torch's own message may not tell what was asked for.
        """
        names = sorted(set().union(*self.symbols.values()))
        says = result != 0 and self.name not in SILENT
        lines = ["int vgpu_unsupported(const char *what);"]
        for name in names:
            body = f'vgpu_unsupported("{name}"); ' if says else ""
            lines.append(f"__attribute__((weak)) long {name}(void) {{ {body}return {result}; }}")
        return "\n".join(lines) + "\n"

    def version_script(self) -> str | None:
        """A linker script that gives the symbols the versions that torch's libraries ask for."""
        versioned = {version: names for version, names in self.symbols.items() if version}
        if not versioned:
            return None
        most = max(versioned, key=lambda version: len(versioned[version]))
        nodes = [f"{most} {{ global: *; }};"]
        nodes += [
            f"{v} {{ global: {' '.join(f'{n};' for n in sorted(names))} }};"
            for v, names in sorted(versioned.items())
            if v != most
        ]
        return "\n".join(nodes) + "\n"


# libcurl is the one library by another maker whose name looks like NVIDIA's
_NVIDIA = re.compile(r"^lib(cu(?!rl)|nv|nccl)\w*(-ml)?\.so")


def stubs_for(needs: Sequence[Needs]) -> list[Stub]:
    """The NVIDIA libraries that these libraries ask for, with every symbol they take from each.

    libcuda and libnvidia-ml, which are opened by name, are always among them.
    """
    wanted: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for soname in ("libcuda.so.1", "libnvidia-ml.so.1"):
        wanted[soname][""] = set()
    for need in needs:
        for library in filter(_NVIDIA.match, need.libraries):
            wanted[library][""] |= set()
        for symbol in need.symbols:
            if symbol.library is not None and _NVIDIA.match(symbol.library):
                wanted[symbol.library][symbol.version or ""].add(symbol.symbol)
    # a library without symbol versions is told by the prefix of its functions: ncclSend, cuFileRead, cuCtxGetCurrent
    prefixes = {
        re.sub(r"^lib|\.so.*$", "", s).lower(): s for s in wanted if s not in ("libcuda.so.1", "libnvidia-ml.so.1")
    }
    for need in needs:
        for symbol in need.symbols:
            if symbol.library is not None:
                continue
            lower = symbol.symbol.lower()
            owner = max((p for p in prefixes if lower.startswith(p)), key=len, default=None)
            if owner is not None:
                wanted[prefixes[owner]][""].add(symbol.symbol)
            elif re.match(r"cu[A-Z]", symbol.symbol):
                wanted["libcuda.so.1"][""].add(symbol.symbol)
            elif re.match(r"nvml[A-Z]", symbol.symbol):
                wanted["libnvidia-ml.so.1"][""].add(symbol.symbol)
    return [
        Stub(soname, {version: frozenset(names) for version, names in sorted(symbols.items())})
        for soname, symbols in sorted(wanted.items())
    ]


# --- building and the cache -------------------------------------------------------------------------------------------


def _fingerprint(torch: Torch, compiler: Sequence[str]) -> str:
    """Changes with everything that goes into a build; cheap, because it is asked at every start."""
    digest = hashlib.sha256(repr((torch, compiler, sys.version_info[:2], platform.machine())).encode())
    for library in _shared_libraries():
        status = library.stat()
        digest.update(f"{library} {status.st_size} {status.st_mtime_ns}\n".encode())
    for source in sorted([*SOURCES.iterdir(), Path(__file__), Path(elf.__file__)]):
        if source.is_file():
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


MANIFEST = "manifest.json"


def _load(folder: Path) -> Driver | None:
    """The driver in this folder, if it is whole: every file as the manifest of its build says."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, checksum in manifest.items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != checksum:
                return None
    except (OSError, ValueError, AttributeError):
        return None
    return Driver(tuple(folder / name for name in manifest))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time."""
    import fcntl  # not on every platform that this module is imported on

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_into(folder: Path, torch: Torch, compiler: Sequence[str]) -> Driver:
    for leftover in folder.parent.glob(".building-*"):  # of a killed process: whoever builds holds the lock
        shutil.rmtree(leftover)
    temporary = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        names = build(temporary, compiler)
        manifest = {name: hashlib.sha256((temporary / name).read_bytes()).hexdigest() for name in names}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
        if folder.exists():  # damaged; processes that run on it keep the files they have open
            folder.rename(temporary / "damaged")
            shutil.rmtree(temporary / "damaged")
        temporary.rename(folder)
        temporary = folder
    finally:
        if temporary != folder:
            shutil.rmtree(temporary, ignore_errors=True)
    driver = _load(folder)
    if driver is None:
        raise UserError(f"{folder}: the virtual GPU's driver was built but cannot be read back; is the disk full?")
    return driver


def build(folder: Path, compiler: Sequence[str]) -> list[str]:
    """Compile all libraries into the folder; their file names, in the order of LD_PRELOAD."""
    try:
        stubs = stubs_for([read_needs(path) for path in _shared_libraries()])
    except ValueError as error:
        raise UserError(f"{error}; install the package that it belongs to anew") from None
    major = next(int(s.soname.rsplit(".", 1)[1]) for s in stubs if s.name == "cudart")
    headers = find_headers(major)
    defines = [f"-D{name}={value}" for name, value in _library_versions(headers.version).items()]
    includes = [f"-I{path}" for path in (SOURCES, *headers.folders)]

    def compile_library(soname: str, sources: Sequence[Path], *extra: str) -> None:
        target = folder / soname
        command = [*compiler, "-std=gnu11", "-O1", "-w", "-fPIC", "-shared", f"-Wl,-soname,{soname}"]
        command += [*defines, *includes, *map(str, sources), *extra, "-o", str(target), "-lpthread", "-ldl", "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise UserError(
                f"the virtual GPU's driver did not compile: '{shlex.join(command)}' said:\n{result.stderr.strip()}"
            )

    state = "libvirtual_gpu.so"
    compile_library(state, [SOURCES / name for name in ("config.c", "memory.c", "objects.c", "capture.c", "staged.c")])

    def compile_stub(stub: Stub) -> None:
        generated = folder / f"{stub.name}.generated.c"
        generated.write_text(stub.generated(UNANSWERED.get(stub.name, 0)))
        answers = SOURCES / f"{stub.name}.c"
        extra = [str(folder / state)]
        if stub.name == "cudart":
            extra.append(str(folder / "libcuda.so.1"))  # for the driver API by name
        script = stub.version_script()
        if script is not None:
            (folder / f"{stub.name}.map").write_text(script)
            extra.append(f"-Wl,--version-script={folder / f'{stub.name}.map'}")
        compile_library(stub.soname, [generated, *([answers] if answers.exists() else [])], *extra)

    compile_stub(next(stub for stub in stubs if stub.name == "cuda"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_stub, [stub for stub in stubs if stub.name != "cuda"]))
    for leftover in [*folder.glob("*.generated.c"), *folder.glob("*.map")]:
        leftover.unlink()
    return [state, *(stub.soname for stub in stubs)]
