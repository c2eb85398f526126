"""What commands print of what others say: nothing that a terminal would obey."""

from __future__ import annotations

import unicodedata

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli.output import expected_errors, plain, print_table, say
from kvstrata.proto.errors import Refused
from tests.e2e import status_documents as documents

NAMES = [*documents.HOSTILE, "a\rb", "\x9b31mred", "\u2066isolated", "zero\u200bwidth"]


def obeyed(text: str) -> list[str]:
    """Characters that are no text, but for the ends of lines."""
    return [each for each in text.replace("\n", "") if not each.isprintable() and each != " "]


@pytest.mark.parametrize("name", NAMES)
def test_tables_lines_and_errors_show_names_and_do_not_obey_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(f"nodes of {name}", ("node",), [(f"{name} [bold]x[/]",)])
    say(f"problem: {name}\nand another: {name}")
    with pytest.raises(typer.Exit), expected_errors():
        raise Refused(f"{name} refused")
    out, err = capsys.readouterr()
    assert obeyed(out) == [] and obeyed(err) == []
    assert "[bold]x[/]" in out.replace("\n", "") and err.startswith("error: ")


@given(st.text())
def test_what_is_text_stays_as_it_is(text: str) -> None:
    shown = plain(text)
    assert len(shown) == len(text) and all(new in (old, "\ufffd") for new, old in zip(shown, text, strict=True))
    assert all(unicodedata.category(each)[0] == "Z" for each in obeyed(shown))
    if text.isprintable():
        assert shown == text
