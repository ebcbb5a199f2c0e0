"""What differs from job to job is formatted as Celery formats it."""

from typing import Any
from uuid import UUID

from celery import Celery
from celery.utils.saferepr import saferepr
from hypothesis import given
from hypothesis import strategies as st

from batchery_producer.template import _repr_function, uuids

APP = Celery("template", set_as_current=False)
TEXTS = st.text() | st.text(alphabet="a '", min_size=900, max_size=1100)
ITEMS = TEXTS | st.none() | st.integers() | st.floats() | st.lists(st.text()) | st.binary()


@given(item=ITEMS)
def test_template_formats_arguments_as_celery_does(item: Any) -> None:
    assert _repr_function(APP)(item) == saferepr((item,), 1024, maxlevels=3)


def test_uuids_are_of_version_4_and_differ() -> None:
    ids = uuids(2000)
    assert len(set(ids)) == 2000
    assert {str(UUID(each)) for each in ids} == set(ids)
    assert {(UUID(each).version, UUID(each).variant) for each in ids} == {
        (4, "specified in RFC 4122")
    }
