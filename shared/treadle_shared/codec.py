"""msgpack carries a message, msgspec validates it: bytes in, typed messages out, nothing else.

Decoding has two steps. ``msgpack.unpackb`` builds plain values under the bounds of ``limits`` before it
allocates anything large; ``msgspec.convert`` checks them against the message types and their field bounds. Small frames
between the processes of a node, which come by the hundred a second, take both steps at once in msgspec.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgpack
import msgspec

from treadle_shared.calls import FromClient, ToClient
from treadle_shared.errors import InvalidRequest, MalformedMessage
from treadle_shared.limits import MAX_DEPTH, MAX_EVENTS, MAX_FRAME_BYTES
from treadle_shared.ticks import FromWorker, ToWorker

_MAX_ITEMS: Final = 16_384  # elements of any list or map; token arrays travel as bytes
_SMALL_FRAME: Final = 64 << 10  # bytes; nothing in a smaller frame can grow far
_BYTES_PER_ITEM: Final = 2  # a real message takes more for every list, map and element
_FREE_ITEMS: Final = 16 << 10  # except for the short rows of a tick, of which there are a few hundred
_BUILTIN_TYPES: Final = (bytes,)  # binary fields take binary, not text in base 64
_encoder: Final = msgspec.msgpack.Encoder()
_from_worker: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(FromWorker)
_to_worker: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(ToWorker)
_to_client: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(list[ToClient])


def encode(message: msgspec.Struct | list[ToClient]) -> bytes:
    """One message, or the broker's list of messages to a client, as msgpack bytes."""
    return _encoder.encode(message)


def unpack(data: bytes | memoryview) -> Any:
    """Plain values from bytes, bounded. Raises MalformedMessage."""
    if len(data) > MAX_FRAME_BYTES:
        raise MalformedMessage(f"a frame of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}")
    budget = _ItemBudget(len(data)) if len(data) > _SMALL_FRAME else None
    try:
        value = msgpack.unpackb(
            data,
            list_hook=budget and budget.spend_list,
            object_hook=budget and budget.spend_map,
            max_str_len=MAX_FRAME_BYTES,
            max_bin_len=MAX_FRAME_BYTES,
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_ITEMS,
            max_ext_len=0,
            strict_map_key=False,
        )
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise MalformedMessage(f"not msgpack: {_reason(error)}") from None
    _check_depth(value, MAX_DEPTH)
    return value


class _ItemBudget:
    """How many lists, maps and elements a frame may hold: one byte on the wire can be 64 in memory."""

    def __init__(self, frame_bytes: int) -> None:
        self._left = _FREE_ITEMS + frame_bytes // _BYTES_PER_ITEM

    def spend_list(self, container: list[Any]) -> list[Any]:
        """The list itself. Raises MalformedMessage when there have been too many items."""
        self._spend(1 + len(container))
        return container

    def spend_map(self, container: dict[Any, Any]) -> dict[Any, Any]:
        """The map itself, which takes four times the memory of a list. Raises MalformedMessage."""
        self._spend(4 + 2 * len(container))
        return container

    def _spend(self, items: int) -> None:
        self._left -= items
        if self._left < 0:
            raise MalformedMessage("too many lists and maps for a frame of this size")


def decode_from_client(data: bytes | memoryview) -> FromClient:
    """A client's message. Raises MalformedMessage, or InvalidRequest where a request's value is at fault."""
    return convert_from_client(unpack(data))


def convert_from_client(value: Any) -> FromClient:
    """The second step of ``decode_from_client``, for a caller that already unpacked."""
    return _convert(value, FromClient)  # type: ignore[no-any-return]


def decode_to_client(data: bytes | memoryview) -> list[ToClient]:
    """The broker's messages to a client. Raises MalformedMessage."""
    messages: list[ToClient] = _decode(data, _to_client, list[ToClient])
    if len(messages) > MAX_EVENTS:
        raise MalformedMessage(f"{len(messages)} messages in one frame, at most {MAX_EVENTS} are allowed")
    return messages


def decode_from_worker(data: bytes | memoryview) -> FromWorker:
    """A worker's message. Raises MalformedMessage."""
    return _decode(data, _from_worker, FromWorker)  # type: ignore[no-any-return]


def decode_to_worker(data: bytes | memoryview) -> ToWorker:
    """The broker's message to its worker. Raises MalformedMessage."""
    return _decode(data, _to_worker, ToWorker)  # type: ignore[no-any-return]


def _decode(data: bytes | memoryview, decoder: msgspec.msgpack.Decoder[Any], wanted: Any) -> Any:
    """A small frame in one step, which costs a fifth. A large one, and one that is wrong, in the two bounded steps."""
    if len(data) <= _SMALL_FRAME:
        try:
            return decoder.decode(data)
        except (ValueError, RecursionError):  # msgspec's errors among them; the second step names what is wrong
            pass
    return _convert(unpack(data), wanted)


def _convert(value: Any, wanted: Any) -> Any:
    try:
        return msgspec.convert(value, wanted, strict=True, builtin_types=_BUILTIN_TYPES)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidRequest):
            raise error.__cause__ from None
        problem, field = split_path(str(error))
        raise MalformedMessage(problem, field) from None
    except (ValueError, RecursionError) as error:  # lone surrogates, absurd nesting
        raise MalformedMessage(_reason(error)) from None


_PATH = re.compile(r" - at (?:`key` in )?`\$([^`]*)`$")


def split_path(text: str) -> tuple[str, str]:
    """msgspec's sentence as ``(problem, field)``: "Expected `int` - at `$.a[0].b`" gives field ``a[0].b``."""
    match = _PATH.search(text)
    if match is None:
        unknown = re.search(r"unknown field `([^`]*)`", text)
        return text, unknown.group(1) if unknown else ""
    problem, path = text[: match.start()], match.group(1).lstrip(".")
    unknown = re.search(r"unknown field `([^`]*)`", problem)
    if unknown:
        path = f"{path}.{unknown.group(1)}" if path else unknown.group(1)
    return problem, path


def _check_depth(value: Any, left: int) -> None:
    if left < 0:
        raise MalformedMessage(f"nested deeper than {MAX_DEPTH} levels")
    kind = type(value)  # msgpack makes plain lists and dicts
    if kind is not list and kind is not dict:
        return
    for item in value.values() if kind is dict else value:
        kind = type(item)
        if kind is list or kind is dict:
            _check_depth(item, left - 1)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
