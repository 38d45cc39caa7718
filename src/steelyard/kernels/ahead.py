"""Kernels compiled without being launched, for a GPU that may not be here, into a folder that may be moved.

    launching_nothing   launches compile (or find) their kernel and its C launcher, and stop there
    compile_ahead       all kernels that some work launches, each once, several at a time
    KernelCache         Triton's cache of files, found again wherever its folder stands
    Kernels             counts what was compiled and what was found

A kernel's key has its source, the values and alignments it was specialised on, the architecture, and Triton's own files
with its libraries: only the same image finds what an image compiled. Arguments may be meta tensors: their addresses
are their offsets, as aligned as a real tensor's.
"""

# mypy: allow-untyped-calls, disable-error-code="misc"
from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

from triton import __version__ as triton_version
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.errors import TritonError
from triton.runtime import build, driver
from triton.runtime.cache import FileCacheManager, get_cache_manager
from triton.runtime.jit import JITCallable

from steelyard.errors import StartError, reason
from steelyard.kernels.gpu import SHARED_BYTES, Gpu

_log = logging.getLogger(__name__)
_ABOUT_TO_PUT = "tmp.pid_"
_OURS = "steelyard.kernels."


class KernelCache(FileCacheManager):
    """Triton's, which notes the whole paths of a kernel's files: here they are taken for names in the same folder.

    Each file's SHA-256 is noted beside it: what a folder that was copied in part holds is made again, and said.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        with _told():
            super().__init__(key, override, dump)

    def get_group(self, filename: str) -> dict[str, str] | None:
        if not self.has_file(f"__grp__{filename}"):
            return None
        try:
            noted = json.loads(Path(self._make_path(f"__grp__{filename}")).read_text())["sha256"]
            files = {name: self._make_path(name) for name in noted}
            is_whole = all(_sha256(Path(at)) == noted[name] for name, at in files.items())
        except (OSError, ValueError, TypeError, KeyError):
            is_whole = False
        if not is_whole:
            self._warn(filename)
        return files if is_whole else None

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        with _told():
            noted = {name: _sha256(Path(at)) for name, at in group.items()}
        return self.put(json.dumps({"child_paths": group, "sha256": noted}), f"__grp__{filename}", binary=False)

    def get_file(self, filename: str) -> str | None:
        found = super().get_file(filename)
        if found is None or not filename.endswith(".so"):
            return found
        try:
            is_whole = Path(f"{found}.sha256").read_text() == _sha256(Path(found))
        except (OSError, ValueError):
            is_whole = False
        if not is_whole:
            self._warn(filename)
        return found if is_whole else None

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        with _told():
            at = self._put(data, filename, binary)
            if filename.endswith(".so"):
                self._put(_sha256(Path(at)), f"{filename}.sha256", binary=False)
            return at

    def _put(self, data: Any, filename: str, binary: bool) -> str:
        try:
            return str(super().put(data, filename, binary))
        except FileNotFoundError:  # taken for a dead process's: a machine that shares the folder knows none of ours
            return str(super().put(data, filename, binary))

    def _warn(self, filename: str) -> None:
        _log.warning("%s of %s is not what was put there: it is compiled again", filename, self.cache_dir)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def _told() -> Iterator[None]:
    """Raises StartError for what the system refuses."""
    try:
        yield
    except OSError as error:
        raise StartError(f"--kernel-cache {knobs.cache.dir}: {reason(error)}", param="kernel_cache") from None


def keep_kernels(folder: str | None, only_binaries: bool = False) -> None:
    """From here on this process keeps and looks for compiled kernels in `folder`; None: where it did.

    What a process that was killed left half put in a named folder is removed. Raises StartError for a folder that
    cannot be looked into.

    `only_binaries`: without the compiler's steps between source and binary, nine tenths of the bytes.
    """
    _settle_keys()
    if only_binaries:
        knobs.compilation.store_binary_only = True
    if folder is not None:
        knobs.cache.dir = os.path.realpath(folder)
        knobs.cache.manager_class = KernelCache
        with _told():
            _clean(Path(knobs.cache.dir))


def _settle_keys() -> None:
    """Have the keys of our kernels' sources made, each after those of the functions that it calls.

    Triton makes a key when a kernel is first launched, and puts in it the globals of those callees alone that have
    theirs by then: of two kernels that share a callee, each key would tell which of them was launched first.
    """
    done: set[int] = set()

    def settle(function: JITCallable) -> None:
        if id(function) in done:
            return
        done.add(id(function))
        for name in function.fn.__code__.co_names:
            if isinstance(called := function.__globals__.get(name), JITCallable):
                settle(called)
        function.cache_key  # noqa: B018  made when it is first asked for

    for module in [m for name, m in sys.modules.items() if name.startswith(_OURS)]:
        for found in list(vars(module).values()):
            if isinstance(found, JITCallable) and found.fn.__module__.startswith(_OURS):
                settle(found)


def _clean(folder: Path) -> None:
    """Remove what processes that are gone were about to put: folders in a kernel's own, named by their process."""
    for left in folder.glob(f"*/{_ABOUT_TO_PUT}*_*"):
        pid = left.name.removeprefix(_ABOUT_TO_PUT).partition("_")[0]
        if pid.isdecimal() and _is_gone(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _is_gone(pid: int) -> bool:
    """Whether this machine has no such process."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False


def kept_in() -> Path:
    """The folder of compiled kernels."""
    return Path(knobs.cache.dir)


def count_kernels() -> Kernels:
    """A count of what is compiled and found from here on, in the whole process."""
    kernels = Kernels()
    knobs.compilation.listener = kernels
    return kernels


class Kernels:
    """Triton's listener: which kernels this process compiled, and which it found, by their keys."""

    def __init__(self) -> None:
        self.compiled: dict[str, str] = {}
        self.is_serving = False
        self._found: dict[str, str] = {}

    def __call__(self, *, metadata: dict[str, Any], cache_hit: bool, **rest: Any) -> None:
        (self._found if cache_hit else self.compiled)[metadata["hash"]] = metadata["name"]
        if self.is_serving and not cache_hit:
            _log.warning("kernel %s was compiled while serving: no step of the start has it", metadata["name"])

    def __str__(self) -> str:
        return f"{len(self.compiled)} compiled, {len(self.found)} from {knobs.cache.dir}"

    @property
    def counts(self) -> dict[str, int]:
        """Of both, by name."""
        return {"compiled": len(self.compiled), "from_cache": len(self.found)}

    @property
    def found(self) -> dict[str, str]:
        """Those that were there before."""
        return {key: name for key, name in self._found.items() if key not in self.compiled}


class CompileOnly:
    """What Triton asks of a driver, for a GPU that is not used: all is compiled, nothing is loaded or launched."""

    def __init__(self, gpu: Gpu, folder: Path, launcher_cls: Callable[..., Any] | None = None) -> None:
        """`launcher_cls`: a real driver's, to have it build its own launchers; `folder`: for a moment's files."""
        self._gpu = gpu
        self.launcher_cls = launcher_cls or self._build_launcher
        self._folder = folder
        self._lock = Lock()
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED_BYTES.get(gpu.capability, 2**20)},
            load_binary=lambda name, binary, shared, device: (self, 0, 0, 0, 1024),
        )

    def get_current_device(self) -> str:
        """A name nobody else has: Triton keeps kernels by it, and these must not be launched."""
        return f"{self._gpu.arch} {self._folder}"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._gpu.number, 32)

    def _build_launcher(self, src: Any, metadata: Any) -> Callable[..., None]:
        """Called by Triton before a first launch: the C launcher goes into the cache, as CudaLauncher would find it."""
        at = {(src.fn.arg_names.index(k),) if isinstance(k, str) else k: v for k, v in src.constants.items()}
        self.build(nvidia.make_launcher(at, dict(src.signature), metadata.tensordesc_meta), "__triton_launcher")
        return lambda *launch: None

    def build_utilities(self) -> None:
        """The C module with which Triton's driver loads kernels."""
        self.build((Path(nvidia.dirname) / "driver.c").read_text(), "cuda_utils")

    def build(self, code: str, name: str) -> None:
        """A C module into the cache, by the key of triton.runtime.build.compile_module_from_src."""
        cache = get_cache_manager(hashlib.sha256((code + build.platform_key()).encode()).hexdigest())
        file = name + sysconfig.get_config_var("EXT_SUFFIX")
        if cache.get_file(file) is not None:
            return
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            source = Path(folder) / f"{name}.c"
            source.write_text(code)
            needs = ["-Wl,--no-as-needed", f"-L{self._folder}", f"-l:{self._libcuda()}"]
            cache.put(Path(_compiled(source, nvidia.include_dirs, needs)).read_bytes(), file)

    def _libcuda(self) -> str:
        """An empty library of libcuda's name: what is linked to it asks for the real one where it is loaded."""
        with self._lock:
            source = self._folder / "libcuda.c"
            if not source.exists():
                source.write_text("")
                self._stub = Path(_compiled(source, [], ["-Wl,-soname,libcuda.so.1"])).name
            return self._stub


def _compiled(source: Path, include: list[str], flags: list[str]) -> str:
    """A shared library beside its source. Raises StartError where the machine cannot."""
    try:
        return str(build._build(source.stem, str(source), str(source.parent), [], include, [], flags))
    except (RuntimeError, subprocess.CalledProcessError, OSError) as error:
        raise StartError(
            f"Triton's launchers need a C compiler and Python's headers (apt-get install gcc python3-dev): {error}"
        ) from None


@contextmanager
def launching_nothing(gpu: Gpu, is_here: bool) -> Iterator[CompileOnly]:
    """In here a launch compiles for `gpu`, or finds its kernel, and that is all; in the whole process.

    `is_here`: whether this machine has it, so that its own driver builds its launchers. Raises StartError where
    kernels are interpreted.
    """
    if knobs.runtime.interpret:
        raise StartError("TRITON_INTERPRET is set: kernels are interpreted and none is compiled; unset it")
    if not is_here and not hasattr(nvidia, "make_launcher"):
        raise StartError(f"Triton {triton_version} builds launchers in a way of its own: pip install triton==3.6.0")
    with tempfile.TemporaryDirectory() as folder:
        stand_in = CompileOnly(gpu, Path(folder), driver.default.launcher_cls if is_here else None)
        before = driver._active
        driver.set_active(stand_in)
        try:
            yield stand_in
        finally:
            driver._active = before


def compile_ahead(work: Callable[[], None], arch: str) -> None:
    """Within `launching_nothing`: compile each kernel that `work` launches, once, on every core.

    `work` computes nothing: give it meta tensors. Raises StartError for a kernel that `arch` cannot have.
    """
    wanted: dict[tuple[Any, str], str] = {}

    def note(*, fn: Any, key: str, compile: dict[str, Any], **rest: Any) -> bool:
        wanted.setdefault((fn.jit_function, key), compile["specialization_data"])
        return True  # no kernel, no launch

    def made(item: tuple[tuple[Any, str], str]) -> None:
        (function, _), data = item
        function.preload(data).run  # noqa: B018  its launcher is built when it is first asked for

    knobs.runtime.jit_cache_hook = note
    try:
        work()
    finally:
        knobs.runtime.jit_cache_hook = None
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            for _ in pool.map(made, wanted.items()):
                pass
        except TritonError as error:
            what = str(error).strip().splitlines()[-1]
            raise StartError(f"a kernel of this model does not compile for {arch}: {what}") from error
