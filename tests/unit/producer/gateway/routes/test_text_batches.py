from batchery_producer.answers import BatchSummary, Outcome
from batchery_producer.gateway.routes.text_batches import (
    collect_batches,
    cut,
    held_length,
    labelled,
    list_devices,
    per_s,
)

FIRST = BatchSummary("b1", 2, 1.5, "cuda:1")
SECOND = BatchSummary("b2", 1, 1.5, "cuda:0")


def test_texts_are_cut_in_order_and_the_last_batch_is_the_rest() -> None:
    assert cut(["a", "b", "c"], 2) == [["a", "b"], ["c"]]
    assert cut(["a"], 32) == [["a"]]


def test_batches_are_counted_once_whichever_texts_they_had() -> None:
    outcomes = [
        Outcome(0, batch=FIRST),
        Outcome(1, batch=FIRST),
        Outcome(2, batch=SECOND),
        Outcome(3),
    ]
    assert collect_batches(outcomes) == {FIRST, SECOND}
    assert list_devices({FIRST, SECOND}) == "cuda:0, cuda:1"
    assert list_devices(set()) is None


def test_labels_have_the_place_of_their_text_in_the_request() -> None:
    value = {"tokens": 3, "label": "GOOD", "score": 0.75}
    assert labelled(["a"], [Outcome(0, value)], 16) == [
        {
            "text": "a",
            "sentiment": "GOOD",
            "confidence": 0.75,
            "token_count": 3,
            "processing_order": 16,
            "truncated": False,
        }
    ]


def test_rate_over_no_time_is_0() -> None:
    assert (per_s(10, 4), per_s(10, 0)) == (2.5, 0.0)


def test_length_that_held_is_that_of_a_text_that_was_cut() -> None:
    whole = {"token_count": 60, "truncated": False}
    assert held_length(512, [whole]) == 512
    assert held_length(512, [whole, {"token_count": 128, "truncated": True}]) == 128
