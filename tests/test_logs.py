"""The targets of log records: standard error, a run's display, or the program's own handlers."""

from __future__ import annotations

import logging

import pytest

from lagrpo import logs

logger = logging.getLogger("lagrpo")


@pytest.fixture(autouse=True)
def _no_handler():
    """Removes the handlers, as in a program that has not called the command line."""
    handlers = list(logger.handlers)
    level = logger.level
    logger.handlers, logger.level = [], logging.NOTSET
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    yield
    logger.handlers = handlers
    logger.setLevel(level)


def test_library_prints_no_record_and_the_command_line_prints_each_once(capfd):
    logger.info("compiling")
    assert capfd.readouterr() == ("", "")
    logs.print_records()
    logs.print_records()
    logging.getLogger("lagrpo.below").info("compiling into %s", "x")
    logger.debug("detail")
    assert capfd.readouterr() == ("", "lagrpo: compiling into x\n")


def test_display_gets_records_instead_of_standard_error(capfd, caplog):
    logs.print_records()
    notes: list[str] = []
    with logs.shown_by(notes.append):
        logger.info("fewer threads")
    logger.info("afterward")
    assert notes == ["fewer threads"]
    assert capfd.readouterr() == ("", "lagrpo: afterward\n")
    assert "fewer threads" in caplog.messages  # the program's own handlers get it, too


ACTS_ON_TERMINALS = {
    "recolor": ("\x1b[31mred", "␛[31mred"),
    "title": ("\x1b]0;title\x07", "␛]0;title␇"),
    "link": ("\x1b]8;;https://x\x1b\\y\x1b]8;;\x1b\\", "␛]8;;https://x␛\\y␛]8;;␛\\"),
    "C1": ("\x9b31m\x85", "\\u009b31m\\u0085"),
    "overwritten": ("good\rbad\b\x7f", "good␍bad␈␡"),
    "bidi override": ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
    "line separators": ("a\u2028b\u2029", "a\\u2028b\\u2029"),
    "zero width": ("a\u200bb\ufeff\u2060", "a\\u200bb\\ufeff\\u2060"),
    "tags": ("\U000e0041", "\\U000e0041"),
    "not UTF-8": ("\udce4", "\\udce4"),
}


@pytest.mark.parametrize(("text", "shown"), ACTS_ON_TERMINALS.values(), ids=ACTS_ON_TERMINALS)
def test_printed_text_shows_characters_that_act_on_the_terminal(capsys, text, shown):
    logs.print_text(text)
    assert capsys.readouterr().out == f"{shown}\n"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("سلام \u200e(a)\u200f", id="Arabic with marks"),
        pytest.param("می\u200cخواهم", id="Persian with a non-joiner"),
        pytest.param("👩\u200d👩\u200d👧 ❤\ufe0f", id="emoji with joiners"),
        pytest.param("漢字 é e\u0301 π", id="wide, composed and combining"),
        pytest.param("a\tb\n", id="tab and newline"),
    ],
)
def test_printed_text_keeps_what_people_write(text):
    assert logs.visible(text) == text


def test_log_record_shows_characters_that_act_on_the_terminal(capfd):
    logs.print_records()
    logger.info("reading %s", "\x1b[2Jdata\u202e")
    assert capfd.readouterr().err == "lagrpo: reading ␛[2Jdata\\u202e\n"
