"""What the broker asks of a tokenizer, and the byte tokenizer of the reference engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from treadle_shared import bytevocab
from treadle_shared.errors import InvalidRequest

BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The byte vocabulary has no control tokens for turns, so a chat is lines of plain text."""

Segment = tuple[str, bool]
"""A piece of text, and whether the texts of special tokens in it mean those tokens."""


class Tokenizer(Protocol):
    """Text to token ids and back, plus what a model's metadata says before the model itself is loaded.

    Token ids are in ``[0, n_vocab)``. Any thread may call it.
    """

    @property
    def name(self) -> str:
        """The model's own name."""
        ...

    @property
    def n_vocab(self) -> int:
        """How many token ids there are."""
        ...

    @property
    def bos(self) -> int:
        """The token that begins a sequence, or -1."""
        ...

    @property
    def eos(self) -> int:
        """The token that ends a sequence, or -1."""
        ...

    @property
    def bos_text(self) -> str:
        """The text of ``bos`` as a template writes it, or empty."""
        ...

    @property
    def eos_text(self) -> str:
        """The text of ``eos`` as a template writes it, or empty."""
        ...

    @property
    def eog(self) -> frozenset[int]:
        """The tokens that end an answer."""
        ...

    @property
    def special_texts(self) -> Sequence[str]:
        """The texts that mean a control token where special tokens are parsed, and plain text elsewhere."""
        ...

    @property
    def max_piece_bytes(self) -> int:
        """The longest piece in bytes: n tokens hold at most n times as many bytes of text."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal to the engine's ``tokenizer_fingerprint`` where both speak of the same tokens."""
        ...

    @property
    def chat_template(self) -> str:
        """The Jinja source that the model brings, or empty."""
        ...

    @property
    def context_train(self) -> int:
        """The context the model was trained for, in tokens; 0 where it does not say."""
        ...

    def kv_bytes_per_token(self, kv_type: str) -> int:
        """Bytes of KV cache a token takes, estimated; 0 where only the engine can tell."""
        ...

    def encode(self, text: str, field: str = "prompt") -> array[int]:
        """The token ids of a text in which nothing is special, with the tokens the model wants at its ends.

        Raises InvalidRequest naming ``field`` where the text cannot be UTF-8.
        """
        ...

    def encode_segments(self, segments: Sequence[Segment], field: str = "messages") -> array[int]:
        """The token ids of the joined segments; BOS leads where the model wants one, and once at most."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to the text; control tokens and those of ``eog`` add none."""
        ...

    def close(self) -> None:
        """Free what the tokenizer holds; it must not be used afterwards."""
        ...


class ByteTokenizer:
    """The byte vocabulary: a token for each UTF-8 byte, BOS and EOS."""

    name = "reference"
    n_vocab = bytevocab.N_VOCAB
    bos = bytevocab.BOS
    eos = bytevocab.EOS
    bos_text = ""
    eos_text = ""
    eog = frozenset({bytevocab.EOS})
    special_texts: Sequence[str] = ()
    max_piece_bytes = 1
    fingerprint = bytevocab.FINGERPRINT
    chat_template = BYTE_CHAT_TEMPLATE
    context_train = 0

    def kv_bytes_per_token(self, kv_type: str) -> int:
        """0: the reference engine's layers are its own affair."""
        return 0

    def encode(self, text: str, field: str = "prompt") -> array[int]:
        """BOS, then the bytes of ``text``. Raises InvalidRequest."""
        return array("i", [bytevocab.BOS, *utf8(text, field)])

    def encode_segments(self, segments: Sequence[Segment], field: str = "messages") -> array[int]:
        """BOS, then the bytes of every segment. Raises InvalidRequest."""
        return self.encode("".join(text for text, _ in segments), field)

    def piece(self, token: int) -> bytes:
        """The byte a token stands for; BOS and EOS stand for none."""
        return bytevocab.piece(token)

    def close(self) -> None:
        """Nothing is held."""


def utf8(text: str, field: str) -> bytes:
    """``text`` as UTF-8. Raises InvalidRequest where it holds a lone surrogate, which UTF-8 cannot express."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid Unicode: a lone surrogate at character {error.start}") from None
