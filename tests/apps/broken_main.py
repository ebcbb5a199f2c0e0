"""An app whose device process cannot import it: started as a script, it lives in __main__."""

from celery import Celery

from batchery import BatchTask, install

app = install(Celery("script", set_as_current=False))


@app.task(shared=False, base=BatchTask)
def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


if __name__ == "__main__":
    app.worker_main(["worker", "-l", "INFO"])
