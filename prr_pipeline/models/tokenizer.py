# SPDX-License-Identifier: Apache-2.0
"""Text to token ids: prompts with a forced start of the answer, and a tokenizer without files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from prr_pipeline.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

BOS, EOS, USER, ASSISTANT = "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIALS = (BOS, EOS, USER, ASSISTANT)
BYTE_VOCAB = 256 + len(SPECIALS)
BOS_ID, EOS_ID = (256 + SPECIALS.index(text) for text in (BOS, EOS))

_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer whose ids 0..255 are the bytes of UTF-8 and whose next ids are SPECIALS.

    It loses nothing: decoding the ids of any text gives that text back. Ids beyond the vocabulary,
    which a model with random weights may emit, decode to nothing.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=_byte_ids(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, answer_prefix: str, chat: bool) -> list[int]:
    """Encodes a prompt that ends with the forced start of the answer.

    Args:
        tokenizer: any tokenizer of transformers.
        text: what the user asks.
        answer_prefix: text that the answer must start with; it follows the assistant's turn marker.
        chat: render text as a user's turn with the tokenizer's chat template. A tokenizer without a
            template gets the plain text, as with chat=False.

    Returns:
        Token ids. A rendered template carries its own special tokens, so that none is added to it
        (BOS comes once); plain text gets those that the tokenizer adds by itself.

    Raises:
        ConfigError: the chat template refuses a single user's turn.
    """
    if not (chat and tokenizer.chat_template):
        return list(tokenizer(text + answer_prefix)["input_ids"])
    # Models that think before they answer would spend the answer's budget on it, where they can be
    # told not to. A template that does not know the variable must not be given it.
    known = "enable_thinking" in tokenizer.get_chat_template()
    switches: dict[str, Any] = {"enable_thinking": False} if known else {}
    try:
        rendered = str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                tokenize=False,
                add_generation_prompt=True,
                **switches,
            )
        )
    except TemplateError as error:
        raise ConfigError(
            f"the tokenizer's chat template cannot render one user's turn ({error}); "
            "model.chat_template=false sends the plain text instead"
        ) from error
    return list(tokenizer(rendered + answer_prefix, add_special_tokens=False)["input_ids"])


def restore_split(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Restores how a GGUF file's tokenizer splits text before BPE, where transformers loses it.

    Args:
        tokenizer: a byte-level BPE tokenizer read from the file; changed in place.
        name: the file's "tokenizer.ggml.pre". Of the kinds that differ from plain byte-level BPE
            only "smollm" is known here: it sets every digit apart from its neighbours and spaces.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    if name == "smollm":
        split = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
        tokenizer.backend_tokenizer.pre_tokenizer = split


def _byte_ids() -> dict[str, int]:
    """Maps the character that stands for each byte in byte-level BPE to the byte's value.

    Printable bytes stand for themselves; the others, in ascending order, got the characters from
    U+0100 on.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    characters = sorted(ByteLevel.alphabet())
    own = {character: ord(character) for character in characters if ord(character) < 256}
    others = sorted(set(range(256)) - set(own.values()))
    return own | dict(zip([c for c in characters if c not in own], others, strict=True))
