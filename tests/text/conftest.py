from __future__ import annotations

from pathlib import Path

import pytest
import sentencepiece as spm

from steelyard.checkpoint.entry import Checkpoint
from steelyard.checkpoint.find import open_checkpoint
from steelyard.text.tokenizer import Tokenizer
from tests.checkpoint.files import write_llama
from tests.text.samples import varied


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    return open_checkpoint("smollm2", "dummy")


@pytest.fixture(scope="session")
def byte_level(smollm2: Checkpoint) -> Tokenizer:
    return Tokenizer.from_checkpoint(smollm2)


# Whether a space is put before each text, and words a user defined: Llama's and Mistral's kind, and Gemma's.
SPM_KINDS = {"llama": (True, []), "gemma": (False, ["▁▁", "▁▁▁", "▁▁▁▁", "\n\n", "\t", "<div>"])}


@pytest.fixture(scope="session", params=sorted(SPM_KINDS))
def spm_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[spm.SentencePieceProcessor, Tokenizer]:
    """A SentencePiece model trained on the spot, and our tokenizer of a GGUF with its vocabulary."""
    return train_spm(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A SentencePiece vocabulary that puts a space before each text."""
    return train_spm("llama", tmp_path_factory.mktemp("spaced"))[1]


def train_spm(kind: str, directory: Path) -> tuple[spm.SentencePieceProcessor, Tokenizer]:
    prefix, user_defined = SPM_KINDS[kind]
    corpus = directory / "corpus.txt"
    lines = [s.replace("\n", " ").replace("\r", " ").replace("\t", " ") for s in varied(1500, seed=7)]
    corpus.write_text("\n".join(s for s in lines if s.strip()) * 2)
    spm.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(directory / "m"),
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=user_defined,
        character_coverage=0.98,
        minloglevel=2,
        num_threads=1,
    )
    owner = spm.SentencePieceProcessor(model_file=str(directory / "m.model"))
    ids = range(owner.get_piece_size())
    kinds = [(owner.is_unknown, 2), (owner.is_control, 3), (owner.is_unused, 5), (owner.is_byte, 6)]
    types = [next((t for test, t in kinds if test(i)), 1) for i in ids]
    pieces = [owner.id_to_piece(i) for i in ids]
    for i, piece in enumerate(pieces):
        if piece in user_defined:
            # As converters write them: defined by the user, and with their spaces as spaces.
            pieces[i], types[i] = piece.replace("▁", " "), 4
    vocabulary = {
        "ggml.model": "llama",
        "ggml.tokens": pieces,
        "ggml.scores": [owner.get_score(i) for i in ids],
        "ggml.token_type": types,
        "ggml.bos_token_id": owner.bos_id(),
        "ggml.eos_token_id": owner.eos_id(),
        "ggml.unknown_token_id": owner.unk_id(),
        "ggml.add_space_prefix": prefix,
    }
    path = write_llama(directory / "m.gguf", vocabulary)
    return owner, Tokenizer.from_checkpoint(open_checkpoint(str(path)))
