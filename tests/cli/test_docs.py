"""The reference pages' generator: writes what is out of date, and only says so with --check."""

from aserve.cli import docs


def test_check_names_stale_pages_and_writing_mends_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(docs, "PAGES", {"a.md": lambda: "one  \n", "b.md": lambda: "\n\ntwo\n\n"})
    monkeypatch.setattr(docs, "REFERENCE", tmp_path)
    (tmp_path / "a.md").write_text("one\n")
    assert docs.main(["--check"]) == 1
    error = capsys.readouterr().err
    assert "b.md" in error
    assert "a.md" not in error
    assert not (tmp_path / "b.md").exists()
    assert docs.main([]) == 0
    assert (tmp_path / "b.md").read_text() == "two\n"
    assert docs.main(["--check"]) == 0
