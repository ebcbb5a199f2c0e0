"""Reranking: the numbers of sentence-transformers, keywords, bad items, what is no reranker."""

import pytest
import torch
from sentence_transformers import CrossEncoder

from batchery.errors import ModelLoadError
from batchery_worker.models.hardware.transfers import PendingCopy
from support.tiny_models import CORPUS, Build, Copy, Load, mend, run

#: Greatest difference of any score in fp32: the sums run in another order.
TOLERANCE = 5e-6

LABEL = ("relevance",)


#: Pairs of very different lengths.
ITEMS = [
    {"query": "cats", "text": "the cat"},
    {"query": "which ships carry tea to the old harbour", "text": "rain"},
    {"query": "rain", "text": " ".join(CORPUS)},
    {"query": " ".join(CORPUS[1:]), "text": CORPUS[0]},
]


@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert", "deberta", "gpt2"])
@pytest.mark.parametrize("forward", ["auto", "padded"])
def test_scores_are_those_of_the_library(
    architecture: str, forward: str, build: Build, load: Load
) -> None:
    folder = build(architecture, labels=LABEL)
    model = load("rerank", folder, max_length=78, forward=forward)
    library = mend(CrossEncoder(str(folder), device="cpu", max_length=78))
    pairs = [(item["query"], item["text"]) for item in ITEMS]
    for raw, function in {True: torch.nn.Identity(), False: torch.nn.Sigmoid()}.items():
        expected = library.predict(pairs, batch_size=1, activation_fn=function)
        found = [each["score"] for each in run(model, ITEMS, raw_scores=raw)]
        assert found == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_a_prompt_of_the_files_goes_in_front(build: Build, load: Load, copied: Copy) -> None:
    folder = copied(build("bert", labels=LABEL))
    CrossEncoder(
        str(folder), device="cpu", prompts={"it": "rain falls "}, default_prompt_name="it"
    ).save(str(folder))
    model, library = load("rerank", folder), CrossEncoder(str(folder), device="cpu")
    pairs = [(item["query"], item["text"]) for item in ITEMS]
    expected = library.predict(pairs, batch_size=1, activation_fn=torch.nn.Identity())
    found = [each["score"] for each in run(model, ITEMS, raw_scores=True)]
    assert found == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_a_pair_that_is_too_long_is_cut_or_refused(build: Build, load: Load) -> None:
    model = load("rerank", build("bert", labels=LABEL), max_length=12)
    item = {"query": "cats", "text": CORPUS[0]}
    assert run(model, [item])[0]["truncated"] is True
    (refused,) = run(model, [item], truncate=False)
    assert str(refused.exception) == "text: 15 tokens are more than max_length = 12 tokens"


def test_a_model_that_is_no_reranker_is_refused_in_a_line(build: Build, load: Load) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load("rerank", build("bert", labels=("no", "yes")))
    assert str(caught.value).endswith(
        "has 2 labels, and a reranker has one; kind = 'classification' takes pairs of texts, too"
    )
    with pytest.raises(ModelLoadError, match="has no trained classification head") as caught:
        load("rerank", build("bert", num_labels=1))
    assert "\n" not in str(caught.value)


def test_large_outputs_keep_their_order(build: Build, load: Load) -> None:
    model = load("rerank", build("bert", labels=LABEL))
    outputs = model.forward(model.preprocess(ITEMS[:3]))
    large = PendingCopy(torch.tensor([[18.0], [30.0], [17.0]]))
    scores = [each["score"] for each in model.postprocess(outputs._replace(pending=large))]
    assert 1 > scores[1] > scores[0] > scores[2] > 0.9999999
