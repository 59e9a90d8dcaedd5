"""Loads, in the process that test processes are forked from, the modules that a run imports on its
way and what transformers makes once in each process."""

import importlib

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

for name in (
    "lagrpo.cli",
    "lagrpo.lifecycle.run",
    "lagrpo.core.recipes",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation.utils",
    "pandas",  # which pyarrow loads
    "pyarrow.parquet",
    "numpy.ctypeslib",
    "pytest",
):
    importlib.import_module(name)
get_checkpoint_conversion_mapping("llama")  # compiles a thousand regular expressions
