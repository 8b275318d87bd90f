"""Keyword arguments to a validated request: a wrong value is refused before anything is sent."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from treadle_shared.calls import Request
from treadle_shared.codec import split_path
from treadle_shared.errors import InvalidRequest
from treadle_shared.limits import MAX_REQUESTS, MAX_TEXT_BYTES, MAX_TOKENS_BYTES
from treadle_shared.sampling import SamplingParams
from treadle_shared.tokens import pack_tokens

KEY_BYTES: Final = 16  # 128 bits: nobody guesses the right to cancel or read another's session

_MAX_TOKEN: Final = 2**31 - 1  # int32 on the wire
_SAMPLING: Final = frozenset(SamplingParams.__struct_fields__)
_PLAIN: Final = frozenset(
    {"max_tokens", "stop", "session_id", "priority", "queue_timeout_s", "deadline_s", "cache_salt"}
)
_SOURCES: Final = ("prompt", "messages")


def build_request(fields: Mapping[str, Any]) -> Request:
    """One request from ``prompt`` (text or token ids) or ``messages`` and the keywords of Options.

    Raises InvalidRequest naming the field.
    """
    unknown = [name for name in fields if name not in _SAMPLING | _PLAIN and name not in _SOURCES]
    if unknown:
        raise InvalidRequest(str(unknown[0]), "is not a field of a request")
    wire: dict[str, Any] = {name: fields[name] for name in _PLAIN if name in fields}
    wire["params"] = {name: fields[name] for name in _SAMPLING if name in fields}
    wire["key"] = secrets.token_bytes(KEY_BYTES)
    wire |= _source(fields)
    if isinstance(wire.get("stop"), str):
        wire["stop"] = [wire["stop"]]
    return _checked(_converted(wire))


def build_requests(items: Iterable[Mapping[str, Any] | Request]) -> list[Request]:
    """The requests of one ``submit_many``. Raises InvalidRequest, its field led by ``requests[i]``."""
    requests = []
    for index, item in enumerate(items):
        if index == MAX_REQUESTS:
            raise InvalidRequest("requests", f"more than {MAX_REQUESTS} in one submission")
        try:
            requests.append(_one(item))
        except InvalidRequest as error:
            raise InvalidRequest(f"requests[{index}].{error.field}", error.problem) from None
    if not requests:
        raise InvalidRequest("requests", "must hold at least one request")
    return requests


def _one(item: Mapping[str, Any] | Request) -> Request:
    if isinstance(item, Mapping):
        return build_request(item)
    if not isinstance(item, Request):
        raise InvalidRequest("", f"must be a mapping or a Request, not {type(item).__name__}")
    key = item.key or secrets.token_bytes(KEY_BYTES)
    again = {name: getattr(item, name) for name in Request.__struct_fields__} | {"key": key}
    return _checked(_converted(again))  # a Struct built by hand was never validated


def _source(fields: Mapping[str, Any]) -> dict[str, Any]:
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if prompt is not None and messages is not None:
        raise InvalidRequest("messages", "a request has a prompt or messages, not both")
    if messages is not None:
        if isinstance(messages, str | bytes) or not isinstance(messages, Iterable):
            raise InvalidRequest("messages", "must be a list of {'role': …, 'content': …}")
        return {"messages": list(messages)}
    if prompt is None:
        raise InvalidRequest("prompt", "must be text or token ids")
    return {"prompt": prompt} if isinstance(prompt, str) else {"tokens": _packed(prompt)}


def _packed(prompt: Any) -> bytes:
    """Token ids as they travel; arrays of numpy and of the standard library are welcome."""
    if isinstance(prompt, bytes | bytearray | memoryview | Mapping) or not isinstance(prompt, Iterable):
        raise InvalidRequest("prompt", f"must be text or token ids, not {type(prompt).__name__}")
    ids: list[Any] = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    for place, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool):
            raise InvalidRequest("tokens", f"token {place} is {type(token).__name__}, not an integer")
        if not 0 <= token <= _MAX_TOKEN:
            raise InvalidRequest("tokens", f"token {place} is {token}; ids are between 0 and {_MAX_TOKEN}")
    if len(ids) * 4 > MAX_TOKENS_BYTES:
        raise InvalidRequest("tokens", f"{len(ids)} token ids, at most {MAX_TOKENS_BYTES // 4} can be sent")
    return pack_tokens(ids)


def _converted(wire: dict[str, Any]) -> Request:
    try:
        return msgspec.convert(msgspec.to_builtins(wire, builtin_types=(bytes,)), Request, strict=True)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidRequest):
            raise error.__cause__ from None
        problem, path = split_path(str(error))
        raise InvalidRequest(path.removeprefix("params."), problem[:1].lower() + problem[1:]) from None
    except (TypeError, ValueError, RecursionError) as error:  # a value no message can hold: a set, an object
        raise InvalidRequest(_culprit(wire), str(error) or type(error).__name__) from None


def _culprit(wire: dict[str, Any]) -> str:
    """The field whose value cannot be turned into a message."""
    for name, value in (wire | wire.get("params", {})).items():
        if name == "params":
            continue
        try:
            msgspec.to_builtins(value, builtin_types=(bytes,))
        except (TypeError, ValueError, RecursionError):
            return str(name)
    return ""


def _checked(request: Request) -> Request:
    """What types cannot say: nothing empty, text that is Unicode and not larger than a frame takes."""
    given = [name for name in ("prompt", "tokens", "messages") if getattr(request, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(given[1] if given else "prompt", "exactly one of prompt, tokens and messages must be set")
    if not getattr(request, given[0]):
        raise InvalidRequest("messages" if given[0] == "messages" else "prompt", "must not be empty")
    for field, text in _texts(request):
        _check_text(field, text)
    return request


def _texts(request: Request) -> Iterable[tuple[str, str]]:
    yield "session_id", request.session_id
    yield "cache_salt", request.cache_salt
    if request.prompt is not None:
        yield "prompt", request.prompt
    for index, stop in enumerate(request.stop):
        yield f"stop[{index}]", stop
    for index, message in enumerate(request.messages or ()):
        yield f"messages[{index}].role", message.role
        yield f"messages[{index}].content", message.content


_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def _check_text(field: str, text: str) -> None:
    """Raise InvalidRequest where ``text`` has no UTF-8 form or is too long to send."""
    if match := _SURROGATE.search(text):
        raise InvalidRequest(field, f"is not Unicode text: a lone surrogate at character {match.start()}")
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise InvalidRequest(field, f"is longer than {MAX_TEXT_BYTES} bytes of UTF-8")


def check_text(field: str, text: object) -> str:
    """``text`` where it can be sent. Raises InvalidRequest."""
    if not isinstance(text, str):
        raise InvalidRequest(field, f"must be text, not {type(text).__name__}")
    _check_text(field, text)
    return text
