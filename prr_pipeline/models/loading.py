# SPDX-License-Identifier: Apache-2.0
"""How transformers loads: without bars and advice on the screen, and parsing a GGUF file once."""

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers' bars and advice off the screen; puts its settings back."""
    from transformers.utils import logging as theirs

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()


@contextmanager
def gguf_read_once() -> Iterator[Any]:
    """Makes transformers parse a GGUF file once where it would three times, and without its bar.

    Parsing 49152 tokens and as many merges takes seconds in Python, and so does the table of tensor
    names, which is rebuilt for every module: 5 s in all instead of 24 s. Yields the reader.
    """
    import gguf
    import numpy as np
    from tqdm.auto import tqdm

    path = "transformers.modeling_gguf_pytorch_utils"  # not in every version
    user = importlib.import_module(path) if importlib.util.find_spec(path) else ModuleType(path)

    def set_data(reader: Any, file: Any) -> None:
        reader.plain = file.view(np.ndarray)

    # A million slices of a memmap are slow, those of a plain view of it are not.
    data = property(lambda reader: reader.plain, set_data)
    reader = functools.cache(type("PlainReader", (gguf.GGUFReader,), {"data": data}))
    names = functools.cache(gguf.get_tensor_name_map)
    with (
        _replaced(gguf, GGUFReader=reader, get_tensor_name_map=names),
        _replaced(user, tqdm=functools.partial(tqdm, disable=True)),
    ):
        yield reader


@contextmanager
def _replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    old = {name: getattr(module, name) for name in values if hasattr(module, name)}
    vars(module).update({name: values[name] for name in old})
    try:
        yield
    finally:
        vars(module).update(old)
