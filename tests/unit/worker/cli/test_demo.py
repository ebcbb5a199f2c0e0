import pytest

from batchery import StartError
from batchery_worker.cli import demo


def test_demo_that_cannot_start_ends_with_code_2_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**_: object) -> None:
        raise StartError("no redis-server")

    monkeypatch.setattr(demo, "Stack", refuse)
    monkeypatch.setattr("sys.argv", ["demo"])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "batchery: error: no redis-server\n"
