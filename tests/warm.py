"""What processes that are forked for tests have imported before: a run imports most of it only on its way, which takes
five seconds of each process."""

from __future__ import annotations

import multiprocessing

MODULES = [
    "lagrpo.cli",
    "lagrpo.training.run",
    "lagrpo.core.recipes",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation.utils",
    "pyarrow.parquet",
    "numpy.ctypeslib",
]
"""modules of packages that are installed: a forkserver does not see the directory of the tests"""

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(MODULES)
