"""What a name of a task means, by what the app and the workers know."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from batchery import SettingsError
from batchery_producer.diagnosis import find_task

WORKERS = {
    "one@h": ["embed [model_aliases=ada,text-embedding-3-small]", "slow [rate_limit=1/m]"],
    "two@h": ["shop.pay"],
}


class Broker:
    """An app whose workers answer as given, one after the other."""

    def __init__(
        self, workers: Mapping[str, Sequence[str]], tasks: Mapping[str, Any] | None = None
    ) -> None:
        self.control = self
        self.tasks = tasks or {}
        self._workers = workers

    def broadcast(self, command: str, *, limit: int | None, **_: Any) -> Any:
        answers = [{name: tasks} for name, tasks in self._workers.items()]
        return answers if limit is None else answers[-limit:]


def find(name: str, workers: Mapping[str, Sequence[str]] = WORKERS, **options: Any) -> str:
    app: Any = Broker(workers, options.get("tasks"))
    return find_task(app, name, options.get("queue"))


@pytest.mark.parametrize("name", ["embed", "shop.pay", "slow"])
def test_a_task_of_any_worker_is_meant_by_its_name(name: str) -> None:
    assert find(name) == name


def test_an_alias_means_the_model_whether_the_app_or_a_worker_knows_it() -> None:
    assert find("text-embedding-3-small") == "embed"
    local = {"mine": SimpleNamespace(model_aliases="ada")}
    assert find("ada", tasks=local) == "mine"
    assert find("mine", tasks=local) == "mine"


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SettingsError, match="'embd': did you mean 'embed'") as caught:
        find("embd")
    assert "embed, shop.pay, slow" in str(caught.value)


def test_it_is_taken_where_a_queue_is_named_or_nobody_answers() -> None:
    assert find("embd", queue="embd") == "embd"
    assert find("embd", {}) == "embd"
