"""The tasks that workers have, as they spell them."""

from batchery.cli.models import ServedTask, draw, served_tasks
from batchery.cli.survey import name_tasks, parse_registered

ANSWERS = {
    "one@h": [
        "embed [model_queue=embed model_aliases=ada,text-embedding-3-small is_installed=True]",
        "shop.pay [rate_limit=10/m]",
    ],
    "two@h": ["shop.pay", "shop.shout [is_installed=True]"],
    "odd@h": {"error": "no such command"},
}


def test_tasks_are_listed_with_what_they_are_and_who_has_them() -> None:
    served = served_tasks(parse_registered(ANSWERS))
    assert served == [
        ServedTask("embed", "model", "embed", ["ada", "text-embedding-3-small"], ["one@h"]),
        ServedTask("shop.pay", "ordinary", None, [], ["one@h", "two@h"]),
        ServedTask("shop.shout", "batch", None, [], ["two@h"]),
    ]
    assert "routed" in draw(served)


def test_a_message_names_the_nearest_task_first_and_not_too_many() -> None:
    assert name_tasks("embd", ["embed", "pay"]).startswith(
        "did you mean 'embed'? there are embed, pay"
    )
    assert "and 12 more" in name_tasks("x", [f"task{number}" for number in range(20)])
    assert name_tasks("x", []) == "there are none"
