"""Extensions of vLLM's worker and of its HTTP server.

vLLM's Python imports this file, which imports nothing of lagrpo.
"""

import hmac
import os


class Worker:
    """A class that --worker-extension-cls mixes into vLLM's worker.

    collective_rpc calls its methods.
    """

    def get_nccl_version(self) -> str:
        """Returns the version of the NCCL that weights are received with, such as 2.27.3."""
        from vllm.distributed.device_communicators.pynccl_wrapper import (  # type: ignore[import-not-found]
            NCCLLibrary,
        )

        return NCCLLibrary().ncclGetVersion()

    def reload_with_head(self, weights_path: str) -> None:
        """Loads a directory of weights.

        On a CPU vLLM 0.32 keeps a packed copy of the output head. It does not renew the copy if the
        head shares its weights with the embedding; this method does.
        """
        self.reload_weights(weights_path=weights_path)  # type: ignore[attr-defined]
        head = getattr(self.get_model(), "lm_head", None)  # type: ignore[attr-defined]
        if head is not None and hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)


class RequireKey:
    """ASGI middleware that wants the API key with every request but those for /health.

    vLLM 0.32 itself wants the key below /v1, /v2 and /inference only: not for the endpoints that
    load weights, call workers or pause the server.
    """

    def __init__(self, app) -> None:
        self.app = app
        self.key = os.environ["VLLM_API_KEY"].encode()

    async def __call__(self, scope, receive, send) -> None:
        if self._is_allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            start = {"status": 401, "headers": [(b"content-type", b"application/json")]}
            await send({"type": "http.response.start", **start})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _is_allowed(self, scope) -> bool:
        # Servers also pass events such as their start and end, which have no path.
        if scope["type"] not in ("http", "websocket") or scope["path"] == "/health":
            return True
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self.key)
