"""The made-up text, and its windows."""

import pytest
import torch

from ddp_teach.text import ALPHABET, DOES, WHEN, WHO, WHOM, Windows, decode, encode, make_text


def test_the_text_is_the_same_every_time_and_another_for_another_seed():
    assert make_text(20) == make_text(20)
    assert make_text(20) != make_text(20, seed=1)
    assert make_text(21).startswith(make_text(20))


def test_every_line_is_a_sentence_of_the_grammar():
    lines = make_text(300).splitlines()
    assert len(lines) == 300
    seen = set()
    for line in lines:
        (parts,) = [
            (who, does, whom, when)
            for who in WHO
            for does in DOES
            for whom in WHOM
            for when in WHEN
            if line == f"{who} {does} {whom}{when}."
        ]
        seen.update(parts)
    assert seen == {*WHO, *DOES, *WHOM, *WHEN}, "every word is used"


def test_encode_and_decode_are_inverse_and_know_the_whole_text():
    text = make_text(100)
    ids = encode(text)
    assert ids.dtype == torch.int64 and ids.shape == (len(text),)
    assert int(ids.max()) < len(ALPHABET)
    assert decode(ids) == text


def test_encode_names_what_it_does_not_know():
    with pytest.raises(ValueError, match="no '!', 'É'"):
        encode("the cat!É")


def test_targets_are_the_characters_that_follow():
    text = make_text(10)
    windows = Windows(text, length=8)
    assert len(windows) == (len(text) - 1) // 8
    for i, (inputs, targets) in enumerate(windows[i] for i in range(len(windows))):
        assert decode(inputs) == text[8 * i : 8 * i + 8]
        assert decode(targets) == text[8 * i + 1 : 8 * i + 9]


def test_count_takes_the_first_windows():
    text = make_text(10)
    few, all_of_them = Windows(text, 8, count=3), Windows(text, 8)
    assert len(few) == 3
    assert all(torch.equal(few[2][k], all_of_them[2][k]) for k in (0, 1))


def test_the_last_window_needs_a_character_after_it():
    assert len(Windows("abcdefgh" * 2, length=8)) == 1
    assert len(Windows("abcdefgh" * 2 + ".", length=8)) == 2


@pytest.mark.parametrize("count", [0, -1, 3])
def test_windows_that_are_not_there_are_refused(count):
    with pytest.raises(ValueError, match=f"1 windows of 8 characters, but {count} were asked"):
        Windows("abcdefgh" * 2, length=8, count=count)


def test_a_text_too_short_for_one_window_is_refused():
    with pytest.raises(ValueError, match="0 windows"):
        Windows("abc", length=8)
