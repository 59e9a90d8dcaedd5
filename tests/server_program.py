"""Stands in for a Python with vLLM: a program that starts a process group of its own, as vLLM does,
then says over HTTP that it is healthy. Its last arguments are those of
`vllm.entrypoints.openai.api_server`."""

from __future__ import annotations

import sys
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch.distributed as dist


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")


server = HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy)
dist.init_process_group(
    "gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1, timeout=timedelta(seconds=5)
)
server.serve_forever()
