"""Text to token ids and back. Incremental decoding is stream.py's; both use one table, so they cannot differ.

Special tokens in text. The text of a control token ("<|im_end|>") inside a string becomes that control token: chat
templates are built on it, and so are raw completions of them. It means that a user who writes it in a message ends
the message, as in other servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from steelyard.checkpoint.entry import Checkpoint, TokenizerSource
from steelyard.errors import CheckpointError, InvalidRequest
from steelyard.text.build import build_tokenizer
from steelyard.text.pieces import pieces_of


class Tokenizer:
    """A vocabulary with its two directions. Immutable after construction; every method may be called in any thread.

    vocab_size       one more than the highest id that has a token; a model's embedding may have more rows
    max_token_bytes  UTF-8 length of the longest token
    special_ids      control tokens: not shown unless asked for
    bos_token_id     what `encode` puts in front where the model wants it
    leading_space    the vocabulary puts a space before each text, and decoding takes it away
    """

    def __init__(self, source: TokenizerSource) -> None:
        self._encoder = build_tokenizer(source)
        table = pieces_of(self._encoder, str(source.path))
        self._pieces = table.by_id
        self.leading_space = table.leading_space
        self._add_bos = source.add_bos
        self.bos_token, self.eos_token = source.bos_token, source.eos_token
        self.bos_token_id = source.bos_token_id
        self.vocab_size = len(self._pieces)
        self.max_token_bytes = max(map(len, self._pieces), default=1)
        added = self._encoder.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """Raises CheckpointError where the checkpoint has no tokenizer, or one of an unsupported kind."""
        if checkpoint.tokenizer is None:
            raise CheckpointError(f"{checkpoint.path}: has no tokenizer; --skip-tokenizer-init serves token ids alone")
        return cls(checkpoint.tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, perhaps none. The interpreter lock is released while the library works.

        With `add_special_tokens`, the BOS token goes in front if the model wants one, but never a second: a text
        (a rendered chat template) that begins with it keeps the one it has. Raises InvalidRequest for text that is
        not Unicode (half of a surrogate pair).
        """
        by_file = add_special_tokens and self._add_bos is None
        try:
            # A batch of one and not `encode`, which would hold the lock: 0.5 s for a megabyte.
            ids: list[int] = self._encoder.encode_batch_fast([text], add_special_tokens=by_file)[0].ids
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequest("the text is not valid Unicode: it has half of a surrogate pair") from None
        bos = self.bos_token_id
        if bos is None or not add_special_tokens:
            return ids
        if by_file:
            return ids[1:] if ids[:2] == [bos, bos] else ids
        return [bos, *ids] if self._add_bos and ids[:1] != [bos] else ids

    def fewest_tokens(self, text: str) -> int:
        """No encoding of the text is shorter than this: refuses a book before it is tokenised."""
        return -(-len(text.encode(errors="replace")) // max(1, self.max_token_bytes))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, continues: bool = False) -> str:
        """The text of some ids; bytes that are not UTF-8 become U+FFFD.

        continues  the ids follow other text, so a leading space is the text's own and stays
        Raises InvalidRequest for an id outside [0, vocab_size).
        """
        self.check_ids(ids)
        hidden = self.special_ids if skip_special_tokens else frozenset()
        pieces = self._pieces
        text = b"".join([pieces[i] for i in ids if i not in hidden]).decode(errors="replace")
        return text[1:] if self.leading_space and not continues and text.startswith(" ") else text

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raises InvalidRequest, naming the first id without a token."""
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise InvalidRequest(f"token id {i} is outside the vocabulary of {self.vocab_size} tokens")

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text; empty for an id the vocabulary does not have (padding rows of a model)."""
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """The same as text, for showing; half a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        found = self._encoder.token_to_id(token)
        return None if found is None else int(found)

    def to_json(self) -> str:
        """The encoder as the text of a tokenizer.json, for libraries that want one."""
        return str(self._encoder.to_str())
