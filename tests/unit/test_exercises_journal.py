"""Whether ranks are stuck is told from what they worked, not from how long they took."""

import json

import pytest

from ddp_teach.exercises.journal import MARK, Journal, read_journals, stuck


def rank(seconds, work_per_second, after=0.0):
    """The journal of a rank that has said nothing for so many seconds, and worked meanwhile."""
    journal = Journal()
    journal.read({"doing": "backward", "advice": "", "time": 100.0, "worked": 2.0})
    for tenth in range(1, int(seconds * 10) + 1):
        working = max(tenth / 10 - after, 0) * work_per_second
        journal.read({"pulse": True, "time": 100 + tenth / 10, "worked": 2 + working})
    return journal


@pytest.mark.parametrize(
    ("journals", "expected"),
    [
        ([rank(2, 0.0), rank(2, 0.0)], True),  # both wait
        ([rank(2, 0.0), rank(0.3, 0.0)], False),  # one has just said something
        ([rank(2, 0.0), rank(2, 0.1)], False),  # one works, though it gets little of a processor
        ([rank(2, 0.0), rank(2, 0.9)], True),  # one is in a loop
        ([rank(2, 0.0), rank(2, 0.9, after=1.5)], False),  # one has just begun to work
        ([rank(9, 0.15), rank(9, 0.15)], True),  # a loop on a slow machine, after a while
        ([rank(2, 0.0), Journal()], False),  # one has said nothing yet
    ],
)
def test_stuck_is_who_waits_with_all_others_or_works_without_a_word(journals, expected):
    assert stuck(journals) is expected


def test_a_word_ends_the_wait():
    journal = rank(2, 0.0)
    assert journal.waits()
    journal.read({"started": "all_reduce(8 x float32)", "time": 102.1, "worked": 2.0})
    assert not journal.waits()
    assert journal.story == ["backward", "all_reduce(8 x float32)"]


def test_a_journal_is_read_from_what_the_ranks_print():
    entry = json.dumps({"said": "hello", "time": 1.0, "worked": 0.5})
    text = f"[rank 1] {MARK}{entry}\n[rank 0] not for the journal\n[rank 1] {MARK}" + '{"cut": \n'
    quiet, told = read_journals(text, 2)
    assert told.printed == {0: ["hello"]} and quiet.printed == {}
