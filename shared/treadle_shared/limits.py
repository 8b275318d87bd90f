"""Bounds of the wire: every list, string and blob a peer can send has one, with its reason."""

from __future__ import annotations

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0

MAX_FRAME_BYTES = 4 << 20  # the largest tick: 256 new sessions, each with its parameters and 1,024 biases
MAX_TEXT_BYTES = 2 << 20  # UTF-8 bytes of one prompt; far above what any session's context holds as text
MAX_TOKENS_BYTES = 2 << 20  # int32 token arrays: 524,288 tokens
MAX_NAME = 128  # characters of an id: a log line stays a line
MAX_MESSAGES = 256  # turns of one chat
MAX_REQUESTS = 256  # requests of one submit_many
MAX_STOPS = 16  # stop strings of one request: each is looked for in every delta
MAX_STOP_CHARS = 256  # characters of one stop string: bounds the text held back
MAX_SEQUENCES = 256  # llama.cpp's own limit of sequences in one context
MAX_EVENTS = 4096  # messages the broker puts into one frame
MAX_DEPTH = 8  # nesting of a message; the deepest real one has 6 levels
MAX_DETAIL = 512  # characters of an explanation
MAX_TOGETHER = 8  # ticks whose answers leave together; as many more may have been sent behind them
MAX_ANSWERS = 64  # frames of one message of a worker: four times what a broker lets it hold back
