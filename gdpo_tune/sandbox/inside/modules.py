"""The part of the standard library that candidates and tests may import.

A locked process cannot open a file, so whatever is not loaded before the fork does not exist
for it. Besides the modules that code names there are those that others load late
(`_strptime`, codecs), without which honest code would fail in the middle.
"""

from __future__ import annotations

import importlib
import sys

AVAILABLE = """
__future__ _strptime abc array ast base64 binascii bisect builtins calendar cmath codecs
collections collections.abc colorsys contextlib copy copyreg csv dataclasses datetime decimal
difflib enum errno fractions functools gc graphlib hashlib heapq hmac inspect io
itertools json keyword linecache locale logging math numbers operator os os.path pathlib pickle
pprint queue random re reprlib secrets shlex signal statistics string struct sys textwrap
threading time timeit token tokenize traceback types typing unicodedata urllib.parse warnings
weakref zlib
encodings.ascii encodings.cp1252 encodings.hex_codec encodings.latin_1
encodings.punycode encodings.raw_unicode_escape encodings.rot_13 encodings.unicode_escape
encodings.utf_16 encodings.utf_16_le encodings.utf_16_be encodings.utf_32 encodings.utf_8_sig
"""


def preload() -> None:
    """Import everything that is available, then forget where modules come from."""
    # NOTE: keeps OpenSSL out, which would double what every fork has to copy; hashlib then
    # takes the interpreter's own implementations.
    sys.modules["_hashlib"] = None  # pyright: ignore[reportArgumentType]
    for name in AVAILABLE.split():
        importlib.import_module(name)
    # NOTE: an empty path makes any other import a ModuleNotFoundError at once.
    sys.path.clear()
    sys.path_importer_cache.clear()
