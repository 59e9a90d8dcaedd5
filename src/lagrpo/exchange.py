"""One request over HTTP and its answer, within a deadline."""

from __future__ import annotations

import time

import urllib3


def exchange(
    pool: urllib3.PoolManager, method: str, url: str, content: bytes | None, seconds: float, most: int = 0
) -> tuple[int, bytes]:
    """Status and body of an answer; of a body the first `most` bytes, 0: all of it. urllib3's own deadlines are for a
    single read: a server that sends a byte now and then would pass them for ever, so the whole is timed here. Raises
    urllib3's HTTPError."""
    end, timeout = time.monotonic() + seconds, urllib3.Timeout(connect=min(10.0, seconds), read=seconds)
    answer = pool.request(method, url, body=content, timeout=timeout, preload_content=False)
    body = bytearray()
    try:
        while (chunk := answer.read1(1 << 16)) and (not most or len(body) < most):
            body += chunk
            if time.monotonic() > end:
                raise urllib3.exceptions.ReadTimeoutError(pool.connection_from_url(url), url, "too slow")
    except BaseException:
        answer.close()
        raise
    if most and len(body) >= most:
        answer.close()  # what comes behind is of no use, and neither is the connection
    else:
        answer.release_conn()
    return answer.status, bytes(body[: most or None])


def find_cause(error: BaseException) -> str:
    """What lies behind an error of urllib3, in a few words."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).rpartition(": ")[2] or type(error).__name__
