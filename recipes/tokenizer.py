"""The embedded policies' tokenizer: byte-level BPE in which an integer from 0 to 99 is one token.

The tokenizer decides what a tiny policy can compute: with one token a digit, it passed a quarter of
the tests that it passes with one token a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

VOCABULARY = 588
"""Largest number of entries without the tags: merges end when every word is one token."""
PAD = "<pad>"
END = "<eos>"
ANSWER_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
TOOL_TAGS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<response>", "</response>"),
    *('{"name":"', '","parameters":{"', '":"', '","', '":', "}}"),
)
"""The punctuation of a call is always the same, so its pieces are entries like tags."""
_PIECES = r"\d{1,2}|[-+*/()=:,.\[\]]"
_NUMBER_REPEATS = 1000


def build_tokenizer(texts: Iterable[str], tags: Sequence[str]) -> PreTrainedTokenizerFast:
    """Learn merges from `texts`; tags become entries of their own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AddedToken, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    marks = re.compile("|".join(map(re.escape, tags)))
    # Every pair of digits must be frequent enough to become one merge.
    numbers = " ".join(f"{number:02d}" for number in range(100))
    corpus = [*(marks.sub("\n", text) for text in texts), *[numbers] * _NUMBER_REPEATS]
    bpe.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    # Not special, because trainers decode with skip_special_tokens and rewards must see the tags.
    entries: list[str | AddedToken] = [
        AddedToken(tag, special=False, normalized=False) for tag in tags
    ]
    tokenizer.add_tokens(entries)
    return tokenizer


def get_token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """Return the id of one entry of the vocabulary."""
    return tokenizer.get_vocab()[token]
