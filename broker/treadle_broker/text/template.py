"""Chat messages to tokens, through the model's own template, with users' text kept plain."""

from __future__ import annotations

import datetime
import re
import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from jinja2 import TemplateError

from treadle_broker.text.sandbox import MAX_RENDERED, ChatSandbox
from treadle_broker.text.special import SpecialTexts
from treadle_broker.text.tokenizer import Segment, Tokenizer, utf8
from treadle_shared.calls import ChatMessage
from treadle_shared.errors import ConfigError, InvalidRequest
from treadle_shared.limits import MAX_DETAIL, MAX_MESSAGES, MAX_TEXT_BYTES

Turn = tuple[str, str]
"""A role and a content."""

_Part = tuple[str, int]
"""Text of the template, and the index of the message whose content follows it; -1 after the last."""

ROLES: Final = ("system", "user", "assistant", "tool")

CHATML: Final = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The turns that most models without a template of their own were trained on."""

_SENTINEL_BYTES: Final = 16  # 128 random bits: nobody's text holds them by chance or design


class ChatTemplate:
    """One model's chat template. Raises ConfigError for ``chat_template`` where it cannot be parsed.

    ``source`` overrides the template that the tokenizer's model brings; without either it is ChatML.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str = "",
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
        sentinel: Callable[[], str] = lambda: secrets.token_hex(_SENTINEL_BYTES),
    ) -> None:
        self._tokenizer = tokenizer
        self._special = SpecialTexts(tokenizer.special_texts)
        self._sentinel = sentinel
        try:
            self._template = ChatSandbox(now).compile_chat(source or tokenizer.chat_template or CHATML)
        except (TemplateError, RecursionError) as error:
            raise ConfigError("chat_template", f"the chat template cannot be used: {error}") from None

    def encode_chat(self, messages: Sequence[ChatMessage]) -> array[int]:
        """The token ids of a chat, up to where the assistant's next turn begins.

        Only the template's own text can become control tokens. Raises InvalidRequest naming the field.
        """
        text = self.render(messages)
        contents = [message.content for message in messages]
        if not any(map(self._special.may_touch, contents)):
            return self._tokenizer.encode_segments([(text, True)])
        segments = _segments(self._parts(messages), contents)
        if not any(map(self._special.occurs_in, contents)) and self._is_harmless(text, segments):
            return self._tokenizer.encode_segments([(text, True)])
        return self._tokenizer.encode_segments(segments)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The chat as text. Raises InvalidRequest with the template's own words where it refuses the messages."""
        _check(messages)
        return self._render([(message.role, message.content) for message in messages])

    def _render(self, turns: Sequence[Turn]) -> str:
        values = {
            "messages": [{"role": role, "content": content} for role, content in turns],
            "add_generation_prompt": True,
            "bos_token": self._tokenizer.bos_text,
            "eos_token": self._tokenizer.eos_text,
        }
        try:
            return _joined(self._template.generate(values))
        except Exception as error:  # a template is a program of its own and may fail in any way
            raise InvalidRequest("messages", f"the chat template refuses them: {error}"[:MAX_DETAIL]) from None

    def _parts(self, messages: Sequence[ChatMessage]) -> list[_Part]:
        """The template's text around each content, found by rendering random stand-ins for the contents.

        Done twice: where the two differ in more than their stand-ins, the template altered a content, and
        what became of it cannot be told from the template's own text.
        """
        first, second = self._parts_once(messages), self._parts_once(messages)
        if first == second:
            return first
        shown = {index for _, index in first}
        altered = next((i for i, m in enumerate(messages) if m.content.strip() and i not in shown), None)
        field = "messages" if altered is None else f"messages[{altered}].content"
        raise InvalidRequest(field, "holds the text of a special token, and the chat template alters it")

    def _parts_once(self, messages: Sequence[ChatMessage]) -> list[_Part]:
        marks = [self._sentinel() if message.content.strip() else "" for message in messages]
        pairs = zip(messages, marks, strict=True)
        text = self._render([(message.role, _stand_in(message.content, mark)) for message, mark in pairs])
        index_of = {mark: index for index, mark in enumerate(marks) if mark}
        pieces = re.split(f"({'|'.join(map(re.escape, index_of))})", text) if index_of else [text]
        return [*zip(pieces[:-1:2], (index_of[mark] for mark in pieces[1::2]), strict=True), (pieces[-1], -1)]

    def _is_harmless(self, text: str, segments: Sequence[Segment]) -> bool:
        """Whether every special text in ``text`` lies in the template's own segments alone."""
        if "".join(part for part, _ in segments) != text:
            return False
        return self._special.count(text) == sum(self._special.count(part) for part, special in segments if special)


def _joined(parts: Iterable[str]) -> str:
    rendered, length = [], 0
    for part in parts:
        rendered.append(part)
        length += len(part)
        if length > MAX_RENDERED:
            raise TemplateError(f"more than {MAX_RENDERED} characters")
    return "".join(rendered)


def _check(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise InvalidRequest("messages", "must hold at least one message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"hold {len(messages)} messages, at most {MAX_MESSAGES} are allowed")
    size = 0
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest(f"messages[{index}].role", f"must be one of {', '.join(ROLES)}")
        size += len(utf8(message.content, f"messages[{index}].content"))
    if size > MAX_TEXT_BYTES:
        raise InvalidRequest("messages", f"hold {size} bytes of text, at most {MAX_TEXT_BYTES} are allowed")


def _around(content: str) -> tuple[str, str, str]:
    """The white space before a content's visible text, that text, and the white space after it."""
    visible = content.strip()
    lead, _, trail = content.partition(visible) if visible else (content, "", "")
    return lead, visible, trail


def _stand_in(content: str, mark: str) -> str:
    """``mark`` in the place of the visible text; the white space stays, because templates trim it."""
    lead, _, trail = _around(content)
    return lead + mark + trail


def _segments(parts: Sequence[_Part], contents: Sequence[str]) -> list[Segment]:
    """The parts with the contents back in place, each with the white space that the template left around it."""
    texts = [text for text, _ in parts]
    segments: list[Segment] = []
    for number, (_, index) in enumerate(parts[:-1]):
        lead, visible, trail = _around(contents[index])
        lead = lead if texts[number].endswith(lead) else ""
        trail = trail if texts[number + 1].startswith(trail) else ""
        segments += [(texts[number].removesuffix(lead), True), (lead + visible + trail, False)]
        texts[number + 1] = texts[number + 1].removeprefix(trail)
    return [segment for segment in (*segments, (texts[-1], True)) if segment[0]]
