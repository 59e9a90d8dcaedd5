# Triton has no types that help, and is not installed everywhere: everything in it is Any.
from typing import Any

def __getattr__(name: str) -> Any: ...
