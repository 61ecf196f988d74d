"""What is missing for the tests that need the pip extra `serve`."""

from importlib.metadata import version
from importlib.util import find_spec

from drot.serving.requirements import OLDEST_TRANSFORMERS, PACKAGES

RELEASE = tuple(int(part) for part in version("transformers").split(".")[:2])
MISSING = [name for name in PACKAGES if find_spec(name) is None]
if RELEASE < OLDEST_TRANSFORMERS:
    MISSING.append(f"transformers {OLDEST_TRANSFORMERS}")
