# SPDX-License-Identifier: Apache-2.0
"""The byte tokenizer loses nothing; prompts carry one BOS and end with the answer's start."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from prr_pipeline.errors import ConfigError
from prr_pipeline.models.tokenizer import BOS, BYTE_VOCAB, EOS, byte_tokenizer, encode_prompt

TOKENIZER = byte_tokenizer()


@settings(deadline=None)
@given(st.text())
@example("a  b\r\n\t\x00\u202e\u4f60\U0001f600 'll <|end|><|user|> 1234")
def test_round_trip_keeps_every_text(text):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text
    assert all(0 <= i < BYTE_VOCAB for i in ids)


@settings(deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<")))
def test_ids_are_the_bytes(text):
    assert TOKENIZER(text, add_special_tokens=False)["input_ids"] == list(text.encode())


def test_size_and_ids_beyond_it():
    assert len(TOKENIZER) == BYTE_VOCAB == 260
    assert (TOKENIZER.bos_token, TOKENIZER.eos_token) == (BOS, EOS)
    assert TOKENIZER.decode([72, 151_551, 105, 9_999]) == "Hi"
    assert TOKENIZER.decode([72, TOKENIZER.eos_token_id], skip_special_tokens=True) == "H"


def test_saved_and_read_back_it_is_the_same(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for chat in (True, False):
        assert encode_prompt(again, "wer \u00e4?", "x", chat) == encode_prompt(TOKENIZER, "wer \u00e4?", "x", chat)


def test_chat_prompt_is_a_user_turn_and_the_start_of_an_answer():
    ids = encode_prompt(TOKENIZER, "2+2?", "It is", chat=True)
    assert TOKENIZER.decode(ids) == "<|bos|><|user|>2+2?<|end|><|assistant|>It is"
    assert ids.count(TOKENIZER.bos_token_id) == 1


def test_plain_prompt_gets_the_tokenizers_own_bos():
    ids = encode_prompt(TOKENIZER, "2+2?", " It is", chat=False)
    assert TOKENIZER.decode(ids) == "<|bos|>2+2? It is"


def test_without_a_template_chat_is_plain_text():
    bare = byte_tokenizer()
    bare.chat_template = None
    assert encode_prompt(bare, "a", "b", True) == encode_prompt(bare, "a", "b", False)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if enable_thinking is false %}[no thoughts]{% endif %}", "[no thoughts]>"),
        ("{% if other is defined %}[other]{% endif %}plain", "plain>"),
    ],
)
def test_thinking_is_switched_off_where_the_template_can(template, expected):
    thinker = byte_tokenizer()
    thinker.chat_template = template
    assert thinker.decode(encode_prompt(thinker, "a", ">", chat=True)) == expected


def test_a_template_that_refuses_says_so():
    strict = byte_tokenizer()
    strict.chat_template = "{{ raise_exception('a system turn must come first') }}"
    with pytest.raises(ConfigError) as raised:
        encode_prompt(strict, "a", "b", chat=True)
    assert "a system turn must come first" in str(raised.value)
    assert "model.chat_template=false" in str(raised.value)
