"""How long the Hugging Face hub is waited for.

Downloads have deadlines of huggingface_hub: HF_HUB_ETAG_TIMEOUT for what a file is, HF_HUB_DOWNLOAD_TIMEOUT for each
read of its content, 10 seconds each unless these environment variables say otherwise. Its other requests (the files of
a repository, for example) have none. A download that another process has begun is waited for until that one ends.
"""

from __future__ import annotations

import os

VARIABLES = ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT")


def limit_waits() -> None:
    """Give requests to the hub that have no deadline of their own that of downloads. A program that made a client with
    deadlines of its own (huggingface_hub.set_client_factory) keeps it. Called before each use of the hub."""
    from huggingface_hub import constants, get_session

    session = get_session()
    if not any(session.timeout.as_dict().values()):
        session.timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT


def describe_waits() -> str:
    """The deadlines in words, without loading huggingface_hub.

    >>> describe_waits()
    'HF_HUB_ETAG_TIMEOUT = 10 s, HF_HUB_DOWNLOAD_TIMEOUT = 10 s without an answer'
    """
    return ", ".join(f"{name} = {os.environ.get(name) or 10} s" for name in VARIABLES) + " without an answer"
