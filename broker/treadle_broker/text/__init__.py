"""The text side of the broker: tokenizers, chat templates, detokenisation, stop strings."""

from treadle_broker.text.assembler import AnswerText
from treadle_broker.text.detokenizer import Detokenizer
from treadle_broker.text.stops import StopMatcher
from treadle_broker.text.template import ChatTemplate
from treadle_broker.text.tokenizer import ByteTokenizer, Tokenizer
from treadle_broker.text.vocab_tokenizer import VocabTokenizer

__all__ = [
    "AnswerText",
    "ByteTokenizer",
    "ChatTemplate",
    "Detokenizer",
    "StopMatcher",
    "Tokenizer",
    "VocabTokenizer",
]
