"""No story stands on both sides of the split."""

import lzma
from pathlib import Path
from random import Random

import pytest

from training.corpus import read_corpus
from training.generator.chat import ask, render
from training.split import fingerprint, group, hash_text, held_out, related_pairs


@pytest.fixture(scope="module")
def stories() -> list[str]:
    """Sixty stories of unlike words: told ones share a plot's sentences, these share nothing."""
    rng = Random(0)
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = ["".join(rng.choices(alphabet, k=6)) for _ in range(3000)]
    return [" ".join(rng.choices(vocabulary, k=120)) for _ in range(60)]


def test_a_story_and_its_chat_stay_on_one_side(stories: list[str]) -> None:
    chats = [render(ask(f"Tell me story {i}.", story)) for i, story in enumerate(stories)]
    texts = stories + chats
    kept_out = held_out(texts, share=0.4)
    assert 10 < len(kept_out) < len(texts) - 10
    for i in range(len(stories)):
        assert (i in kept_out) == (i + len(stories) in kept_out)


def test_questions_on_one_passage_stay_on_one_side(stories: list[str]) -> None:
    texts = [render(ask(f"{story}\n\nQuestion {k}?", f"Answer {k}.")) for story in stories for k in range(3)]
    kept_out = held_out(texts, share=0.4)
    for first in range(0, len(texts), 3):
        assert len({index in kept_out for index in range(first, first + 3)}) == 1


def test_nothing_held_out_shares_its_sequences_with_training(stories: list[str]) -> None:
    """Half of a story quoted in another document is enough to keep both together."""
    quotes = [f"somebody once wrote {' '.join(story.split()[:60])} and so on" for story in stories]
    texts = stories + quotes
    kept_out = held_out(texts, share=0.3)
    trained = {int(h) for i, text in enumerate(texts) if i not in kept_out for h in fingerprint(text)}
    assert kept_out
    for index in kept_out:
        assert not trained & set(fingerprint(texts[index]).tolist())


def test_one_answer_to_two_questions_is_found() -> None:
    answer = "A thing for sitting on."
    a, b = render(ask("What is a chair?", answer)), render(ask('Define "chair".', answer))
    assert related_pairs([fingerprint(a), fingerprint(b)]) == [(0, 1)]


def test_pinned_texts_keep_their_relatives_in_training(stories: list[str]) -> None:
    free = held_out(stories, share=0.5)
    pinned = [stories[index] for index in free]
    assert free
    assert not held_out(stories, share=0.5, pinned=pinned) & free


def test_documents_of_an_earlier_run_are_held_out_with_their_relatives(stories: list[str]) -> None:
    texts = [*stories, render(ask("Again?", stories[7]))]
    assert held_out(texts, share=0.0, also={hash_text(stories[7])}) == {7, len(stories)}


def test_the_choice_depends_on_texts_not_on_order(stories: list[str]) -> None:
    turned = stories[::-1]
    assert {stories[i] for i in held_out(stories, 0.3)} == {turned[i] for i in held_out(turned, 0.3)}


def test_groups_are_connected_components() -> None:
    assert sorted(map(sorted, group(6, [(0, 1), (1, 4), (2, 3)]))) == [[0, 1, 4], [2, 3], [5]]


def test_sequences_found_everywhere_do_not_relate(stories: list[str]) -> None:
    form = "welcome to our shop please tell me what you would like to order today"
    texts = [f"{form} {story}" for story in stories]
    assert related_pairs([fingerprint(text) for text in texts]) == []


def test_corpus_files_are_read_in_order(tmp_path: Path) -> None:
    for number, texts in (("02", ["c"]), ("01", ["a", "b"])):
        content = "".join(f"{text}\n<|endoftext|>\n" for text in texts)
        (tmp_path / f"{number}_x.txt.xz").write_bytes(lzma.compress(content.encode()))
    assert [(d.source, d.text) for d in read_corpus(tmp_path)] == [("01", "a"), ("01", "b"), ("02", "c")]
    with pytest.raises(FileNotFoundError, match="no corpus file"):
        read_corpus(tmp_path / "absent")
