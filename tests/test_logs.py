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
