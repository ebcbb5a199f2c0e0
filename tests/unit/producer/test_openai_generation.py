"""OpenAI's requests for texts, and the forms of their answers."""

from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from batchery_producer.gateway.problems import build_problem, validate
from batchery_producer.openai_generation import (
    CHAT_URL,
    TEXT_URL,
    ChatForm,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TextForm,
    build_completion,
    count_chars,
)

MESSAGES = [{"role": "user", "content": "the cat"}]

TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def item(**fields: Any) -> Any:
    (found,) = ChatRequest.model_validate({"messages": MESSAGES, **fields}).items()
    return found


def test_request_that_says_nothing_has_the_temperature_of_openai_and_leaves_the_rest() -> None:
    assert item() == {"messages": MESSAGES, "options": {"temperature": 1.0}}
    nothing = {"n": 1, "top_p": 1, "presence_penalty": 0, "stop": [], "logit_bias": {}, "top_k": -1}
    assert item(**nothing, temperature=None, seed=None, tools=None, unknown="x") == item()


def test_options_have_the_names_that_models_know() -> None:
    found = item(
        max_completion_tokens=5, max_tokens=9, temperature=0, top_logprobs=2, logprobs=True, n=2
    )
    assert found["options"] == {"temperature": 0, "max_new_tokens": 5, "logprobs": 2, "n": 2}
    assert item(logprobs=True)["options"]["logprobs"] == 0
    # Without `logprobs` they are not wanted.
    assert item(top_logprobs=2) == item()
    # What an engine may not have is for it to refuse.
    assert item(presence_penalty=0.5)["options"]["presence_penalty"] == 0.5


def test_fields_that_only_a_server_knows_go_to_it_as_they_came() -> None:
    found = item(max_completion_tokens=5, reasoning_effort="low", parallel_tool_calls=False)
    assert found["extra_body"] == {
        "reasoning_effort": "low",
        "parallel_tool_calls": False,
        "max_completion_tokens": 5,
        "max_tokens": None,
    }
    assert item(max_completion_tokens=5, max_tokens=9)["extra_body"]["max_tokens"] == 9
    (text,) = CompletionRequest(prompt="abc", user="me").items()
    assert text["extra_body"] == {"user": "me"}
    assert count_chars([text]) == len('abc{"user": "me"}')


def test_tools_go_to_the_template_unless_none_may_be_called() -> None:
    assert item(tools=TOOLS)["tools"] == TOOLS
    assert item(tools=TOOLS, tool_choice="auto") == item(tools=TOOLS)
    assert item(tools=TOOLS, tool_choice="required")["tool_choice"] == "required"
    none = {"tools": TOOLS, "tool_choice": "none"}
    assert item(**none) == {**item(), "extra_body": none}


def test_messages_keep_further_fields_and_lose_nulls() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}], "name": None}]
    assert item(messages=messages)["messages"] == [
        {"role": "assistant", "tool_calls": [{"id": "a"}]}
    ]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], "b"], [[1], "b"])],
)
def test_each_prompt_is_an_item(prompt: Any, prompts: list[Any]) -> None:
    items = CompletionRequest(prompt=prompt, logprobs=0).items()
    assert [each["prompt"] for each in items] == prompts
    assert [each["options"] for each in items] == [{"temperature": 1.0, "logprobs": 0}] * len(items)


@pytest.mark.parametrize(
    ("form", "body", "text"),
    [
        (ChatRequest, {}, "messages: Field required"),
        (ChatRequest, {"messages": []}, "messages: List should have at least 1 item"),
        (ChatRequest, {"messages": [{"content": "a"}]}, "messages.0.role: Field required"),
        (ChatRequest, {"messages": MESSAGES, "functions": []}, "functions: expected null or false"),
        (CompletionRequest, {"prompt": []}, "prompt: expected a text, a list of token ids"),
        (CompletionRequest, {"prompt": "a", "temperature": 3}, "temperature: Input should be less"),
        (
            CompletionRequest,
            {"prompt": "a", "stop": ["a"] * 17},
            "stop: expected a text, or a list of up",
        ),
        (CompletionRequest, {"prompt": "a", "echo": True}, "echo: expected null or false"),
    ],
)
def test_body_that_is_wrong_says_why(
    form: type[GenerationRequest], body: dict[str, Any], text: str
) -> None:
    with pytest.raises(RequestValidationError) as raised:
        validate(form, body)
    assert str(build_problem(raised.value)).startswith(text)


def test_characters_are_those_of_prompts_and_of_chats_with_their_tools() -> None:
    assert count_chars(["abc"]) == count_chars([{"prompt": [1, 2, 3], "options": {}}]) == 3
    assert count_chars([item(tools=TOOLS)]) > count_chars([item()]) > len("the cat")
    # What all share goes with each.
    prompts: Any = ["ab"] * 3
    many = CompletionRequest(prompt=prompts, stop="x" * 8, user="me").items()
    assert count_chars(many) == 3 * len('ab"xxxxxxxx"{"user": "me"}')
    # Whatever the alphabet.
    ascii_, other = (
        [{"role": "user", "content": text * 100}] for text in "a\N{CJK UNIFIED IDEOGRAPH-732B}"
    )
    assert count_chars([item(messages=ascii_)]) == count_chars([item(messages=other)])


LOGPROBS = [
    {"token": "é", "id": 5, "logprob": -0.5, "top": [["é", 5, -0.5], ["e", 6, -1.5]]},
    {"token": " a", "id": 7, "logprob": -2.0, "top": [[" b", 8, -0.1]]},
]


def test_whole_answer_has_all_choices_and_the_tokens_of_all_prompts() -> None:
    first = {"text": "x", "finish_reason": "length", "tokens_in": 2, "tokens_out": 3}
    choices = [{"text": "y", "finish_reason": "stop"}, {"text": "z", "finish_reason": "stop"}]
    second = {"choices": choices, "tokens_in": None, "tokens_out": 4}
    body = build_completion(TEXT_URL, "1", "chat", [first, second])
    assert [(each["index"], each["text"]) for each in body["choices"]] == [
        (0, "x"),
        (1, "y"),
        (2, "z"),
    ]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9}
    assert (body["id"], body["object"]) == ("cmpl-1", "text_completion")
    body = build_completion(CHAT_URL, "1", "chat", [first])
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "x"}
    assert (body["id"], body["object"]) == ("chatcmpl-1", "chat.completion")


def test_logarithms_have_the_form_of_each_route() -> None:
    chat = ChatForm().whole(0, {"text": "é a", "finish_reason": "stop", "logprobs": LOGPROBS})
    content = chat["logprobs"]["content"]
    assert content[0]["bytes"] == [0xC3, 0xA9]
    assert [each["token"] for each in content[0]["top_logprobs"]] == ["é", "e"]
    part = {"token": "\ufffd", "logprob": -1.0, "top": [["\ufffd", 1, -1.0], ["a", 2, -2.0]]}
    for known, expected in (
        ([[0xC3], [0xC3], None], [[0xC3], [0xC3], [0x61]]),
        ([], [None, None, [0x61]]),
    ):
        told = ChatForm().logprobs(0, {"logprobs": [{**part, "bytes": known}]})
        assert told is not None
        own = told["content"][0]
        assert [own["bytes"], *(each["bytes"] for each in own["top_logprobs"])] == expected
    form = TextForm()
    first = form.piece(0, {"text": "é a", "logprobs": LOGPROBS})["logprobs"]
    assert first == {
        "tokens": ["é", " a"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"é": -0.5, "e": -1.5}, {" b": -0.1}],
        "text_offset": [0, 1],
    }
    # Later pieces of the same choice go on; those of another one begin anew.
    again = form.piece(0, {"text": "é", "logprobs": LOGPROBS[:1]})["logprobs"]
    other = form.piece(1, {"text": "é", "logprobs": LOGPROBS[:1]})["logprobs"]
    assert again is not None
    assert other is not None
    assert (again["text_offset"], other["text_offset"]) == ([3], [0])


def test_tool_calls_of_an_engine_pass() -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    choice = {"text": "", "finish_reason": "tool_calls", "message": {"tool_calls": calls}}
    assert ChatForm().whole(0, choice)["message"] == {
        "role": "assistant",
        "content": "",
        "tool_calls": calls,
    }
    piece = {"text": "", "delta": {"tool_calls": calls}}
    assert ChatForm().piece(0, piece)["delta"] == {"tool_calls": calls}
